"""KV-aware routing over real processes with the torch-free engine: restarts, hot spots, sessions, faults under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import GRAPH, ServedGraph, serving
from routing_load import Ask, Told, ask, ask_all, make_ids

DISAGG = {
    "prefill.engine": "fake", "decode.engine": "fake", "prefill.replicas": 2, "decode.replicas": 2,
    "prefill.gpus": 0, "decode.gpus": 0,
}  # fmt: skip
AGG = {"worker.engine": "fake", "worker.replicas": 4, "worker.gpus": 0}


@pytest.fixture(scope="module")
def agg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGraph]:
    """Four aggregated workers, shared by the tests that disturb nothing."""
    with serving("graph/agg.py", log=tmp_path_factory.mktemp("agg") / "serve.log", sets=AGG) as graph:
        yield graph


def worker_blocks(graph: ServedGraph) -> dict[str, float]:
    """The blocks that the router credits each worker with."""
    return {labels["worker"]: value for labels, value in graph.metrics()["headrace_router_worker_blocks"]}


def wait_for(condition: Any, timeout_s: float = 20.0) -> None:
    """Fails unless the condition becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def kill_worker(graph: ServedGraph, id: str) -> None:
    """SIGKILL; returns once its next life is ready and the router knows it."""
    old = replica(graph, id)["pid"]
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: replica(graph, id)["state"] == "ready" and replica(graph, id)["pid"] != old, 60)
    wait_for(lambda: id in worker_blocks(graph))


def replica(graph: ServedGraph, id: str) -> dict[str, Any]:
    """One replica as `graph status` tells it."""
    replicas = graph.status()["nodes"][id.partition("/")[0]]["replicas"]
    return next(replica for replica in replicas if replica["id"] == id)


# --- R01


@pytest.mark.parametrize(("num_prompts", "num_tokens"), [(10, 400), pytest.param(50, 2_000, marks=pytest.mark.soak)])
def test_a_restarted_worker_is_credited_with_nothing(num_prompts: int, num_tokens: int, log: Path) -> None:
    prompts = [Ask(make_ids(seed, num_tokens)) for seed in range(num_prompts)]
    with serving("graph/disagg.py", log=log, sets=DISAGG) as graph:
        warm = ask_all(graph.url, prompts, at_once=4)
        wait_for(lambda: sum(worker_blocks(graph).values()) >= num_prompts * (num_tokens // 16))
        [(most, _)] = Counter(told.worker for told in warm).most_common(1)
        kill_worker(graph, most)
        assert worker_blocks(graph)[most] == 0
        again = ask_all(graph.url, prompts, at_once=4)
        assert [told.status for told in again] == [200] * num_prompts
        assert [told.text for told in again] == [told.text for told in warm]
        assert len({told.worker for told in again}) == 2  # neither flooded nor left out
        errors = graph.metric("headrace_overlap_error_tokens_sum") / (2 * num_prompts)
        assert errors <= 16  # predictions stay within a block of what the workers had


# --- R03


@pytest.mark.parametrize("num_requests", [96, pytest.param(400, marks=pytest.mark.soak)])
def test_neither_a_shared_prompt_nor_unique_ones_make_a_hot_spot(num_requests: int, agg: ServedGraph) -> None:
    system = make_ids(1_000, 1_500)
    shared = [Ask((*system, *make_ids(2_000 + i, 20)), max_tokens=64) for i in range(num_requests)]
    single = [Ask(make_ids(10_000 + i, 200), max_tokens=64) for i in range(num_requests)]
    for requests in (shared, single):
        answers = ask_all(agg.url, requests, at_once=64)
        assert {told.status for told in answers} == {200}
        shares = [count / num_requests for count in Counter(told.worker for told in answers).values()]
        assert len(shares) == 4
        assert min(shares) >= 0.1
        assert max(shares) <= 0.5


def test_a_shared_prompt_stays_on_one_worker_while_nobody_is_busy(agg: ServedGraph) -> None:
    system = make_ids(5_000, 1_500)
    answers = ask_all(agg.url, [Ask((*system, *make_ids(6_000 + i, 20))) for i in range(10)], at_once=1)
    [(_, most)] = Counter(told.worker for told in answers).most_common(1)
    assert most >= 9
    assert all(told.cached_tokens >= 1_488 for told in answers[1:])


@pytest.mark.soak
def test_gathering_on_a_shared_prompt_costs_no_throughput(log: Path) -> None:
    system = make_ids(1_000, 1_500)
    requests = [Ask((*system, *make_ids(2_000 + i, 20)), max_tokens=64) for i in range(400)]
    took_s = {}
    for policy in ("round_robin", "kv"):
        with serving("graph/agg.py", log=log, sets={**AGG, "router.policy": policy}) as graph:
            ask_all(graph.url, requests[:8], at_once=8)
            began_s = time.monotonic()
            assert {told.status for told in ask_all(graph.url, requests, at_once=64)} == {200}
            took_s[policy] = time.monotonic() - began_s
    assert took_s["kv"] <= took_s["round_robin"] / 0.8


# --- R04


async def talk(url: str, num_sessions: int, num_turns: int, *, is_chat: bool) -> list[list[Told]]:
    """Interleaved sessions whose history grows; each turn waits for the session's last one."""

    async def session(client: httpx.AsyncClient, number: int) -> list[Told]:
        messages: tuple[dict[str, str], ...] = ()
        ids: tuple[int, ...] = ()
        told = []
        for turn in range(num_turns):
            words = " ".join(f"s{number}t{turn}w{word}" for word in range(40))
            messages = (*messages, {"role": "user", "content": words})
            ids = (*ids, *make_ids(100 * number + turn + 1_000_000, 300))
            told.append(await ask(client, Ask(messages=messages) if is_chat else Ask(ids)))
            messages = (*messages, {"role": "assistant", "content": told[-1].text})
        return told

    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        return list(await asyncio.gather(*(session(client, number) for number in range(num_sessions))))


@pytest.mark.parametrize("is_chat", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["chat", "completions"])
@pytest.mark.parametrize(("num_sessions", "num_turns"), [(6, 4), pytest.param(20, 6, marks=pytest.mark.soak)])
def test_a_session_returns_to_its_cache(num_sessions: int, num_turns: int, is_chat: bool, agg: ServedGraph) -> None:
    before = agg.metric("headrace_overlap_actual_tokens_total") if not is_chat else 0.0
    sessions = asyncio.run(talk(agg.url, num_sessions, num_turns, is_chat=is_chat))
    later = [(told, turns[index].worker) for turns in sessions for index, told in enumerate(turns[1:])]
    assert {told.status for turns in sessions for told in turns} == {200}
    assert sum(told.cached_tokens > 0 for told, _ in later) >= 0.9 * len(later)
    assert sum(told.worker == last for told, last in later) >= 0.8 * len(later)
    assert agg.metric("headrace_overlap_actual_tokens_total") > before
    assert all(abs(told.predicted_tokens - told.cached_tokens) <= 16 for told, _ in later)


@pytest.mark.soak
@pytest.mark.parametrize("is_chat", [True, False], ids=["chat", "completions"])
def test_a_session_returns_to_its_prefill_worker(is_chat: bool, log: Path) -> None:
    with serving("graph/disagg.py", log=log, sets={**DISAGG, "decode.replicas": 1}) as graph:
        sessions = asyncio.run(talk(graph.url, 20, 6, is_chat=is_chat))
        later = [(told, turns[index].prefill) for turns in sessions for index, told in enumerate(turns[1:])]
        assert sum(told.cached_tokens > 0 for told, _ in later) >= 0.9 * len(later)
        remote = [(told, last) for told, last in later if told.prefill is not None and last is not None]
        assert sum(told.prefill == last for told, last in remote) >= 0.8 * len(remote)
        assert graph.metric("headrace_overlap_actual_tokens_total") > 0


# --- explanations


def test_explain_tells_what_will_be_done(agg: ServedGraph) -> None:
    words = " ".join(f"explained{i}" for i in range(200))
    messages = ({"role": "user", "content": words},)
    first = ask_all(agg.url, [Ask(messages=messages)], at_once=1)[0]
    wait_for(lambda: explained(agg, messages)["choice"]["overlap_blocks"] > 0, 5)
    told = explained(agg, messages)
    assert told["policy"] == "kv"
    assert told["choice"]["worker"] == first.worker
    costs = {worker["worker"]: worker["cost"] for worker in told["workers"]}
    assert len(costs) == 4
    assert min(costs, key=lambda worker: costs[worker]) == first.worker
    again = ask_all(agg.url, [Ask(messages=messages)], at_once=1)[0]
    assert again.worker == first.worker
    assert again.cached_tokens == told["choice"]["overlap_blocks"] * told["tokens_per_block"]


def explained(graph: ServedGraph, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
    """The reply to POST /router/explain."""
    told: dict[str, Any] = graph.client.post("/router/explain", json={"messages": list(messages)}).json()
    return told


def test_the_command_explains_as_well(agg: ServedGraph) -> None:
    command = [GRAPH, "explain", "--graph", agg.name, "-m", "Name the capital of Japan."]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "policy kv" in text
    assert all(f"worker/{i}" in text for i in range(4))
    told = json.loads(subprocess.run([*command, "--json"], capture_output=True, timeout=60, check=True).stdout)
    assert told["choice"]["worker"] in text


def test_what_cannot_be_explained_is_refused_by_name(agg: ServedGraph) -> None:
    reply = agg.client.post("/router/explain", json={"prompt": [[1, 2], [3]]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt"
    assert agg.client.post("/router/explain", json={"messages": "x"}).status_code == 400


# --- faults under load


def test_no_request_is_lost_when_the_router_or_a_worker_dies(log: Path) -> None:
    prompts = [Ask(make_ids(i % 8, 300), max_tokens=24) for i in range(160)]
    with serving("graph/agg.py", log=log, sets=AGG) as graph:
        expected = [told.text for told in ask_all(graph.url, prompts[:8], at_once=8)]

        async def disturbed() -> list[Told]:
            load = asyncio.create_task(asyncio.to_thread(ask_all, graph.url, prompts, at_once=16))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(os.kill, replica(graph, "router/0")["pid"], signal.SIGKILL)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(os.kill, replica(graph, "worker/1")["pid"], signal.SIGKILL)
            return await load

        answers = asyncio.run(disturbed())
        assert Counter(told.status for told in answers) == {200: len(prompts)}
        assert [told.text for told in answers] == [expected[i % 8] for i in range(len(prompts))]
        wait_for(lambda: replica(graph, "router/0")["state"] == replica(graph, "worker/1")["state"] == "ready", 60)
        wait_for(lambda: len(worker_blocks(graph)) == 4)
        again = ask_all(graph.url, prompts[:8], at_once=1)
        assert sum(told.predicted_tokens > 0 for told in again) >= 7  # the new router knows from snapshots
        assert all(told.predicted_tokens == told.cached_tokens for told in again)


def test_a_placement_without_a_router_costs_milliseconds(log: Path) -> None:
    prompts = [Ask(make_ids(i, 50), max_tokens=2) for i in range(40)]
    with serving("graph/agg.py", log=log, sets={**AGG, "worker.replicas": 2}) as graph:
        ask_all(graph.url, prompts[:4], at_once=1)
        os.kill(replica(graph, "router/0")["pid"], signal.SIGKILL)
        began_s = time.monotonic()
        answers = ask_all(graph.url, prompts, at_once=1)
        assert {told.status for told in answers} == {200}
        assert (time.monotonic() - began_s) / len(prompts) < 0.25


def test_shed_requests_are_told_when_to_come_back_and_counted(log: Path) -> None:
    limits = {
        "worker.replicas": 1, "worker.fake.step_ms": 20, "router.max_worker_requests": 2, "router.max_waiting": 2,
        "router.max_wait_s": 0.3,
    }  # fmt: skip
    with serving("graph/agg.py", log=log, sets={**AGG, **limits}) as graph:

        async def flood() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=graph.url, timeout=60, trust_env=False) as client:
                body = Ask(make_ids(1, 20), max_tokens=64).body
                return list(await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(10))))

        replies = asyncio.run(flood())
        statuses = Counter(reply.status_code for reply in replies)
        assert statuses == {200: statuses[200], 429: statuses[429]}
        assert statuses[200] >= 2
        assert statuses[429] >= 6
        shed = [reply for reply in replies if reply.status_code == 429]
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in shed)
        assert all(reply.json()["error"]["code"] == "rate_limit_exceeded" for reply in shed)
        assert graph.metric("headrace_router_shed_total") == statuses[429]
