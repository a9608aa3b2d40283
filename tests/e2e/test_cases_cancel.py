"""Black-box cases of clients that leave and of faults that never stop: C01, C03, C04, D08, L04."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest
from harness import ServedGraph, serving
from streams import Outcome, bodies, faults, keep_busy, run_streams

FAKE = {"prefill.engine": "fake", "decode.engine": "fake", "decode.fake.step_ms": 5}
PROBE = {"prompt": list(range(500, 540)), "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGraph]:
    sets = {**FAKE, "decode.replicas": 2}
    with serving("graph/disagg.py", log=tmp_path_factory.mktemp("cancel") / "serve.log", sets=sets) as served:
        yield served


@pytest.fixture(scope="module")
def probe(graph: ServedGraph) -> str:
    """The undisturbed answer to `PROBE`."""
    return ask_probe(graph)


def ask_probe(graph: ServedGraph) -> str:
    reply = graph.client.post("/v1/completions", json=PROBE).raise_for_status().json()
    text: str = reply["choices"][0]["text"]
    return text


def open_stream(graph: ServedGraph, body: dict[str, Any]) -> socket.socket:
    """Sends a streamed request on a connection of its own."""
    data = json.dumps({"stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    client = socket.create_connection(("127.0.0.1", graph.port))
    client.sendall(head.encode() + b"\r\n\r\n" + data)
    return client


def hang_up(client: socket.socket, *, reset: bool) -> None:
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def assert_idle(graph: ServedGraph, within_s: float) -> None:
    """Fails unless nothing runs and no block is held on either side in time."""
    names = ("headrace_requests_running", "headrace_requests_waiting", "headrace_kv_blocks_used", "headrace_kv_leases")
    graph.wait_until(lambda: all(graph.metric(name) == 0 for name in names), within_s)


def test_c01_clients_that_leave_while_it_decodes(graph: ServedGraph, probe: str) -> None:
    logs = len(graph.run("logs").stdout.splitlines())
    body = {"prompt": PROBE["prompt"], "max_tokens": 4000, "ignore_eos": True}
    clients = [open_stream(graph, body) for _ in range(20)]
    for client in clients:
        received = b""
        while received.count(b"data: ") < 5:
            received += client.recv(65536)
    for number, client in enumerate(clients):
        hang_up(client, reset=number % 2 == 0)
    assert_idle(graph, 2.0)
    assert len(graph.run("logs").stdout.splitlines()) - logs <= 20
    assert ask_probe(graph) == probe


def leave_during_transfers(graph: ServedGraph, delays_ms: Sequence[int], rounds: int) -> None:
    for number in range(rounds):
        for delay_ms in delays_ms:
            salt = f"c03-{number}-{delay_ms}"
            body = {"prompt": [33] * 8000, "max_tokens": 50, "ignore_eos": True, "cache_salt": salt}
            clients = [open_stream(graph, body) for _ in range(16)]
            time.sleep(delay_ms / 1e3)
            for client in clients:
                hang_up(client, reset=False)
    assert_idle(graph, 12.0)  # a lease that decode could not release runs out
    fresh = [{"prompt": [40 + i] * 8000, "max_tokens": 2, "temperature": 0} for i in range(16)]
    assert [outcome.fault for outcome in asyncio.run(run_streams(graph.url, fresh)) if outcome.fault] == []


def test_c03_clients_that_leave_during_prefill_and_transfer(graph: ServedGraph, probe: str) -> None:
    leave_during_transfers(graph, (0, 20, 80, 320), 1)
    assert ask_probe(graph) == probe


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_c03_in_full(graph: ServedGraph, probe: str) -> None:
    leave_during_transfers(graph, (0, 5, 10, 20, 40, 80, 160, 320, 640), 5)
    assert ask_probe(graph) == probe


def storm(graph: ServedGraph, num: int, after_s: float, rounds: int) -> None:
    rng = random.Random(4)
    for _ in range(rounds):
        clients = [
            open_stream(graph, {"prompt": [rng.randrange(300, 40_000) for _ in range(2000)], "max_tokens": 500})
            for _ in range(num)
        ]
        time.sleep(after_s)
        for client in clients:
            hang_up(client, reset=True)


def test_c04_abort_storm(graph: ServedGraph, probe: str) -> None:
    pids = [graph.pids(node) for node in ("prefill", "decode")]
    storm(graph, 60, 0.5, 2)
    began = time.monotonic()
    assert ask_probe(graph) == probe
    assert time.monotonic() - began < 10
    assert_idle(graph, 30.0)
    assert [graph.pids(node) for node in ("prefill", "decode")] == pids


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_c04_in_full(graph: ServedGraph, probe: str) -> None:
    def seconds() -> float:
        began = time.monotonic()
        outcomes = asyncio.run(run_streams(graph.url, bodies(50, max_tokens=200)))
        assert not [outcome.fault for outcome in outcomes if outcome.fault]
        return time.monotonic() - began

    before = min(seconds() for _ in range(3))
    storm(graph, 300, 3.0, 4)
    assert ask_probe(graph) == probe
    assert_idle(graph, 30.0)
    assert min(seconds() for _ in range(3)) < before * 1.1


class Harm:
    """The faults of D08, one after the other."""

    def __init__(self, graph: ServedGraph) -> None:
        self._graph = graph

    def kill(self, node: str) -> None:
        os.kill(self._graph.pids(node)[0], signal.SIGKILL)

    def pause(self, seconds: float) -> None:
        self._graph.wait_node("prefill")
        pid = self._graph.pids("prefill")[0]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def scale(self) -> None:
        for count in (1, 2):
            assert self._graph.run("scale", f"decode={count}").returncode == 0


async def corrupted(graph: ServedGraph, harms: Sequence[tuple[Any, ...]], gap_s: float) -> list[str]:
    """Answers that ended well and were wrong, while the harms are done."""
    requests = bodies(40, max_tokens=16, prompt_tokens=100)
    expected: list[Outcome] = await run_streams(graph.url, requests)
    assert faults(expected, expected) == []
    over = asyncio.Event()
    load = asyncio.create_task(keep_busy(graph.url, requests, expected, over, at_once=32))
    for harm, *args in harms:
        await asyncio.sleep(gap_s)
        await asyncio.to_thread(harm, *args)
    await asyncio.sleep(gap_s)
    over.set()
    tally = await load
    assert tally.num_good > 40
    return tally.faults


@pytest.mark.timeout(120)
def test_d08_no_answer_is_corrupted_by_faults(graph: ServedGraph) -> None:
    harm = Harm(graph)
    wrong = asyncio.run(corrupted(graph, [(harm.kill, "prefill"), (harm.kill, "decode"), (harm.pause, 1.0)], 1.0))
    assert wrong == []
    graph.wait_state()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_d08_in_full(graph: ServedGraph) -> None:
    harm = Harm(graph)
    aborts = (storm, graph, 50, 0.2, 1)
    harms = [(harm.kill, "prefill"), (harm.kill, "decode"), (harm.pause, 5.0), aborts, (harm.scale,)] * 4
    assert asyncio.run(corrupted(graph, harms, 9.0)) == []
    graph.wait_state()


def churn(graph: ServedGraph, num: int, *, restart_every: int) -> None:
    """Short requests: half streamed, a fifth cancelled, one in twenty invalid; workers restarted in between."""
    for number in range(num):
        body = {**PROBE, "prompt": [600 + number % 500] * 30, "max_tokens": 4}
        if number % 20 == 0:
            assert graph.client.post("/v1/completions", json={**body, "max_tokens": -1}).status_code == 400
        elif number % 5 == 0:
            hang_up(open_stream(graph, {**body, "max_tokens": 400}), reset=True)
        else:
            graph.client.post("/v1/completions", json={**body, "stream": number % 2 == 0}).raise_for_status()
        if restart_every and number % restart_every == restart_every - 1:
            assert graph.run("restart", "decode/1").returncode == 0


def held(graph: ServedGraph, node: str) -> tuple[int, int, int]:
    """File descriptors, threads and bytes of the first replica of `node`."""
    process = psutil.Process(graph.pids(node)[0])
    return process.num_fds(), process.num_threads(), process.memory_info().rss


@pytest.mark.parametrize(
    ("num", "every"), [(100, 100), pytest.param(5000, 500, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_l04_nothing_grows_with_requests_and_restarts(graph: ServedGraph, num: int, every: int) -> None:
    nodes = ("frontend", "processor", "router", "prefill", "decode")
    churn(graph, num // 5, restart_every=0)
    before = {node: held(graph, node) for node in nodes}
    churn(graph, num, restart_every=every)
    assert_idle(graph, 10.0)
    for node in nodes:
        (fds, threads, rss), (had_fds, had_threads, had_rss) = held(graph, node), before[node]
        assert abs(fds - had_fds) <= 10, node
        assert abs(threads - had_threads) <= 10, node
        assert rss < had_rss * 1.05 + (8 << 20), node
