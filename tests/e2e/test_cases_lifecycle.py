"""Black-box cases of one replica each: to zero and back, kills without a second one, and what a stop leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import ServedGraph, assert_gone, serving, start
from streams import bodies, faults, run_streams

from graph.rundir import base_dir

FAKE = {"prefill.engine": "fake", "decode.engine": "fake", "decode.fake.step_ms": 10}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGraph]:
    with serving("graph/disagg.py", log=tmp_path_factory.mktemp("cases") / "serve.log", sets=FAKE) as served:
        yield served


def chat(graph: ServedGraph) -> httpx.Response:
    return graph.client.post("/v1/chat/completions", json=CHAT)


def first_success_s(graph: ServedGraph, timeout_s: float = 30.0) -> float:
    """How long it takes until a chat is answered again."""

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return chat(graph).status_code == 200
        return False

    return graph.wait_until(answers, timeout_s)


@pytest.mark.timeout(120)
def test_k01_scale_to_zero_and_back(graph: ServedGraph) -> None:
    assert graph.run("scale", "decode=0").returncode == 0
    began = time.monotonic()
    refused = chat(graph)
    assert time.monotonic() - began < 2
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert graph.client.get("/v1/models").status_code == 200
    assert graph.client.get("/live").status_code == 200
    assert graph.client.get("/health").status_code == 503
    assert graph.status()["nodes"]["decode"] == {"desired": 0, "ready": 0, "replicas": []}
    assert graph.metric("headrace_kv_blocks_used", node="prefill") == 0
    assert graph.run("scale", "decode=1", "--no-wait").returncode == 0
    first_success_s(graph)
    assert graph.client.get("/health").json()["status"] == "ready"


@pytest.mark.timeout(120)
def test_d05_prefill_killed_during_transfers_and_back(graph: ServedGraph) -> None:
    decode = graph.pids("decode")
    requests: list[dict[str, Any]] = [
        {"prompt": [33 + i] * 8000, "max_tokens": 4, "temperature": 0, "cache_salt": "d05"} for i in range(8)
    ]
    expected = asyncio.run(run_streams(graph.url, [{**r, "cache_salt": "undisturbed"} for r in requests]))

    async def kill() -> None:
        await asyncio.sleep(0.2)
        os.kill(prefill[0], signal.SIGKILL)

    for _ in range(2):
        prefill = graph.pids("prefill")
        began = time.monotonic()
        assert faults(asyncio.run(run_streams(graph.url, requests, kill)), expected) == []
        assert time.monotonic() - began < 30
        graph.wait_node("prefill")
        assert first_success_s(graph) < 10
    assert graph.pids("decode") == decode
    graph.wait_until(lambda: graph.metric("headrace_kv_blocks_used") == 0, 5.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "node", ["decode", *(pytest.param(n, marks=pytest.mark.soak) for n in ("processor", "router"))]
)
def test_d09_the_only_one_killed_is_named_and_comes_back(graph: ServedGraph, node: str) -> None:
    requests = bodies(20, max_tokens=150)
    expected = asyncio.run(run_streams(graph.url, requests))

    async def kill() -> None:
        await asyncio.sleep(0.8)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(graph.wait_until, is_named, 5.0)

    def is_named() -> bool:
        return repr(node) in str(graph.client.get("/health").json()["missing"])

    pid = graph.pids(node)[0]
    assert faults(asyncio.run(run_streams(graph.url, requests, kill)), expected) == []
    graph.wait_node(node)
    assert first_success_s(graph) < 15
    assert "killed by SIGKILL" in graph.replicas(node)[0]["reason"]


@pytest.mark.timeout(120)
def test_d09_the_only_ingress_killed_comes_back_on_the_same_port(graph: ServedGraph) -> None:
    os.kill(graph.pids("frontend")[0], signal.SIGKILL)
    assert first_success_s(graph) < 15
    graph.wait_state()
    graph.wait_until(lambda: graph.metric("headrace_requests_running") == 0, 5.0)


STOPS = {
    "ctrl-c": (signal.SIGINT,),
    "ctrl-c-twice": (signal.SIGINT, signal.SIGINT),
    "sigterm": (signal.SIGTERM,),
    "sigkill": (signal.SIGKILL,),
    "sighup": (signal.SIGHUP,),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "how", ["sigkill", *(pytest.param(h, marks=pytest.mark.soak) for h in STOPS if h != "sigkill")]
)
def test_k06_nothing_is_left_whatever_ends_it(how: str, tmp_path: Path) -> None:
    before = left_behind()
    graph = start("graph/disagg.py", log=tmp_path / "serve.log", sets=FAKE)
    graph.wait_ready()
    family = graph.family()

    async def end() -> None:
        await asyncio.sleep(0.5)
        for number in STOPS[how]:
            graph.process.send_signal(number)
            await asyncio.sleep(0.3)

    outcomes = asyncio.run(run_streams(graph.url, bodies(12, max_tokens=100), end))
    code = graph.process.wait(45)
    graph.client.close()
    assert code == {"ctrl-c-twice": 130, "sigkill": -signal.SIGKILL}.get(how, 0)
    if code == 0:
        assert not [outcome.fault for outcome in outcomes if outcome.fault], "what ran had time to finish"
    assert_gone(family, 15.0)
    with serving("graph/disagg.py", log=tmp_path / "again.log", sets=FAKE, port=graph.port):
        pass
    assert left_behind() <= before


def left_behind() -> set[str]:
    """Run folders of graphs; their processes are known by id, and end with them."""
    folder = base_dir(os.environ)
    return {str(entry) for entry in folder.iterdir()} if folder.is_dir() else set()
