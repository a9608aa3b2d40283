"""SIGKILL of every component while 64 streams run: none fails, each answer is that of the undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
import psutil
import pytest
from harness import ServedGraph, serving
from streams import Outcome, bodies, faults, run_streams

NODES = ("frontend", "processor", "router", "prefill", "decode")
TWO_OF_EACH = {f"{node}.replicas": 2 for node in NODES if node != "router"}
FAKE = {"prefill.engine": "fake", "decode.engine": "fake", "decode.fake.step_ms": 20}
NUM_STREAMS = 64
LONGEST_PAUSE_S = 30.0
LONGEST_MODEL_PAUSE_S = 90.0  # four engines on two cores, one of which starts again
HANG_BOUND_S = 12.0 + 3.0  # `PING_INTERVAL_S` + `LOOP_PATIENCE_S`, and what a busy machine adds


class Bench:
    """A served graph, requests to it, and their undisturbed answers."""

    def __init__(self, graph: ServedGraph, requests: list[dict[str, Any]]) -> None:
        self.graph = graph
        self.requests = requests
        self.expected = asyncio.run(run_streams(graph.url, requests))
        assert not [outcome.fault for outcome in self.expected if outcome.fault]

    def disturbed(self, harm: Callable[[], Awaitable[None]]) -> list[Outcome]:
        """The answers while `harm` is done."""
        return asyncio.run(run_streams(self.graph.url, self.requests, harm))

    def faults(self, outcomes: Sequence[Outcome], *, lost_ports: set[int] = frozenset()) -> list[str]:
        """What is wrong, but for the streams whose connections came from `lost_ports`."""
        kept = [(o, e) for o, e in zip(outcomes, self.expected, strict=True) if o.local_port not in lost_ports]
        return faults([o for o, _ in kept], [e for _, e in kept])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    log = tmp_path_factory.mktemp("kills") / "serve.log"
    with serving("graph/disagg.py", log=log, sets={**FAKE, **TWO_OF_EACH}) as graph:
        yield Bench(graph, bodies(NUM_STREAMS, max_tokens=100))


def killing(pid: int, after_s: float, ports: set[int]) -> Callable[[], Awaitable[None]]:
    """SIGKILLs a process while the streams run; notes which clients were connected to it."""

    async def harm() -> None:
        await asyncio.sleep(after_s)
        connections = psutil.Process(pid).net_connections("tcp")
        ports.update(c.raddr.port for c in connections if c.raddr)
        os.kill(pid, signal.SIGKILL)

    return harm


class Kill(msgspec.Struct):
    """What one kill did to the streams."""

    wrong: list[str]
    num_checked: int
    longest_pause_s: float


def kill_once(bench: Bench, node: str, number: int, *, after_s: float) -> Kill:
    """Kills a replica of `node`, another one for every `number`, so long after the streams began."""
    bench.graph.wait_node(node)
    pids, lost = bench.graph.pids(node), set[int]()
    outcomes = bench.disturbed(killing(pids[number % len(pids)], after_s, lost))
    assert lost or node != "frontend", "nobody was connected to the ingress that was killed"
    lost_ports = lost if node == "frontend" else set[int]()
    checked = [outcome for outcome in outcomes if outcome.local_port not in lost_ports]
    pause_s = max(outcome.longest_pause_s for outcome in checked)
    return Kill(bench.faults(outcomes, lost_ports=lost_ports), len(checked), pause_s)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("node", NODES)
def test_killed_nothing_is_lost(bench: Bench, node: str, number: int) -> None:
    kill = kill_once(bench, node, number, after_s=0.6 + 0.3 * number)
    assert kill.wrong == []
    assert kill.longest_pause_s < LONGEST_PAUSE_S


def test_what_was_killed_is_counted_and_told(bench: Bench) -> None:
    bench.graph.wait_state()
    for node in NODES:
        assert any("killed by SIGKILL" in replica["reason"] for replica in bench.graph.replicas(node))
        assert bench.graph.metric("headrace_replica_restarts_total", node=node) >= 1
    assert bench.graph.metric("headrace_replacements_total") > 0
    assert bench.graph.metric("headrace_http_takeovers_total") > 0
    assert bench.graph.metric("headrace_kv_blocks_used") == 0
    assert bench.graph.metric("headrace_requests_running") == 0


def test_all_processors_at_once_only_cost_time(bench: Bench) -> None:
    async def harm() -> None:
        await asyncio.sleep(0.8)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    pids = bench.graph.pids("processor")
    assert bench.faults(bench.disturbed(harm)) == []


def test_stopped_decode_worker_is_replaced_within_the_bound(bench: Bench) -> None:
    async def harm() -> None:
        await asyncio.sleep(0.6)
        os.kill(victim["pid"], signal.SIGSTOP)

    bench.graph.wait_state()
    victim = bench.graph.replicas("decode")[0]
    outcomes = bench.disturbed(harm)
    assert bench.faults(outcomes) == []
    assert max(outcome.longest_pause_s for outcome in outcomes) < HANG_BOUND_S
    assert not psutil.pid_exists(victim["pid"])
    assert "hung" in bench.graph.replicas("decode")[0]["reason"]


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("node", NODES)
def test_killed_ten_times_under_the_default_model(
    node: str, tmp_path_factory: pytest.TempPathFactory, record_property: Callable[[str, object], None]
) -> None:
    sets = {**TWO_OF_EACH, "prefill.dtype": "float32", "decode.dtype": "float32"}
    with serving("graph/disagg.py", log=tmp_path_factory.mktemp("kills") / "serve.log", sets=sets) as graph:
        bench = Bench(graph, bodies(NUM_STREAMS, max_tokens=24))
        kills = [kill_once(bench, node, number, after_s=1.0 + 2.0 * (number % 5)) for number in range(10)]
    record_property("streams checked", sum(kill.num_checked for kill in kills))
    record_property("failed or other text", sum(len(kill.wrong) for kill in kills))
    record_property("longest pause, s", round(max(kill.longest_pause_s for kill in kills), 1))
    assert [wrong for kill in kills for wrong in kill.wrong] == []
    assert max(kill.longest_pause_s for kill in kills) < LONGEST_MODEL_PAUSE_S
