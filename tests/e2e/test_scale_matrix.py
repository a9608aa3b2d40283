"""Every component scaled up and down under load: no failed request, nothing left behind (cases K02, K03)."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from harness import GRAPH, ServedGraph, serving
from streams import Tally, bodies, faults, keep_busy, run_streams

SCALABLE = ("frontend", "processor", "prefill", "decode")
FAKE = {"prefill.engine": "fake", "decode.engine": "fake", "decode.fake.step_ms": 10}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGraph]:
    with serving("graph/disagg.py", log=tmp_path_factory.mktemp("scale") / "serve.log", sets=FAKE) as served:
        yield served


def under_load(graph: ServedGraph, work: Callable[[], Awaitable[None]], *, at_once: int = 24) -> Tally:
    """What became of the requests of an endless load while `work` was done."""
    requests = bodies(32, max_tokens=40)
    expected = asyncio.run(run_streams(graph.url, requests))
    assert faults(expected, expected) == []

    async def both() -> Tally:
        over = asyncio.Event()
        load = asyncio.create_task(keep_busy(graph.url, requests, expected, over, at_once=at_once))
        try:
            await work()
        finally:
            over.set()
        return await load

    return asyncio.run(both())


async def command(graph: ServedGraph, *args: str) -> None:
    """A `graph` command that must work out, beside the load."""
    done = await asyncio.to_thread(graph.run, *args)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(180)
def test_everything_up_and_down_under_load(graph: ServedGraph) -> None:
    async def work() -> None:
        await command(graph, "scale", *(f"{node}=+1" for node in SCALABLE))
        await asyncio.sleep(2.0)
        served.update(await asyncio.to_thread(graph.samples, "headrace_generation_tokens_total", "replica"))
        served.update(await asyncio.to_thread(graph.samples, "headrace_engine_generated_tokens_total", "replica"))
        await command(graph, "scale", *(f"{node}=-1" for node in SCALABLE))
        await command(graph, "restart", "router")

    served: dict[str, float] = {}
    family = {p.pid for p in graph.family()}
    tally = under_load(graph, work)
    assert tally.faults == []
    assert tally.num_good > 24
    assert served["decode/1"] > 0
    assert served["processor/1"] > 0
    graph.wait_state()
    assert len({p.pid for p in graph.family()}) == len(family)
    assert graph.metric("headrace_kv_blocks_used") == 0


@pytest.mark.timeout(120)
def test_scale_down_while_busy_drains(graph: ServedGraph) -> None:
    """K02: the streams of the workers that leave go on to their end there, and nobody new is sent to them."""

    async def shrink() -> None:
        await asyncio.sleep(0.7)
        draining = asyncio.create_task(asyncio.to_thread(graph.run, "scale", "decode=1"))
        while not is_draining():
            assert not draining.done(), "nothing was seen to drain"
            await asyncio.sleep(0.02)
        assert (await draining).returncode == 0

    def is_draining() -> bool:
        states = graph.metrics()["headrace_replicas"]
        return any(labels == {"node": "decode", "state": "draining"} for labels, _ in states)

    assert graph.run("scale", "decode=2").returncode == 0
    requests = bodies(60, max_tokens=200)
    expected = asyncio.run(run_streams(graph.url, requests))
    outcomes = asyncio.run(run_streams(graph.url, requests, shrink))
    assert faults(outcomes, expected) == []
    assert [r["id"] for r in graph.replicas("decode")] == ["decode/0"]


IMPOSSIBLE = {
    "decode=1.5": "is not NODE=N",
    "decode=abc": "is not NODE=N",
    "decode=-5": "fewer than 0",
    "foo=2": "no node 'foo'; the graph has frontend",
    "router=2": "at most 1 replica of Router",
    "decode=99": "replicas that compute",
}


def test_impossible_is_refused_before_anything_is_touched(graph: ServedGraph) -> None:
    """K03."""
    before = {n: [r["pid"] for r in counts["replicas"]] for n, counts in graph.status()["nodes"].items()}
    for target, says in IMPOSSIBLE.items():
        refused = graph.run("scale", "prefill=2", target)
        assert refused.returncode == 2
        assert says in refused.stderr
    assert before == {n: [r["pid"] for r in counts["replicas"]] for n, counts in graph.status()["nodes"].items()}


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_flapping_ends_in_what_was_asked_last(graph: ServedGraph) -> None:
    """K03: commands that overlap are carried out one after the other."""
    flags = ["--graph", graph.name]
    flaps = [subprocess.Popen([GRAPH, "scale", f"processor={n}", *flags], stdout=subprocess.DEVNULL) for n in (3, 1, 2)]
    assert [flap.wait(60) for flap in flaps] == [0, 0, 0]
    assert graph.run("scale", "processor=2").returncode == 0
    assert [r["id"] for r in graph.replicas("processor")] == ["processor/0", "processor/1"]


@pytest.mark.soak
@pytest.mark.timeout(120)
def test_gpus_are_divided_refused_and_used_again(log: Path) -> None:
    """K05, with GPUs by name only: who gets which, too few of them, and one that becomes free."""
    with serving("graph/disagg.py", log=log, sets=FAKE, env={"CUDA_VISIBLE_DEVICES": "3,5"}) as graph:
        assert sorted(gpus_of(graph, "prefill") + gpus_of(graph, "decode")) == ["3", "5"]
        refused = graph.run("scale", "decode=3")
        assert refused.returncode == 2
        assert "that takes 4 GPUs (decode 3, prefill 1), but there are 2" in refused.stderr
        assert graph.run("scale", "prefill=0", "decode=2").returncode == 0
        assert sorted(gpus_of(graph, "decode")) == ["3", "5"]


def gpus_of(graph: ServedGraph, node: str) -> list[str]:
    return [gpu for replica in graph.replicas(node) for gpu in replica["gpus"]]


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("node", SCALABLE)
def test_twenty_times_up_and_down_leaves_nothing(
    graph: ServedGraph, node: str, record_property: Callable[[str, object], None]
) -> None:
    async def cycles(num: int) -> None:
        for _ in range(num):
            await command(graph, "scale", f"{node}=2")
            await command(graph, "scale", f"{node}=1")

    def held() -> tuple[int, int, int]:
        family = graph.family()
        shared = len(os.listdir("/dev/shm"))
        return len(family), sum(p.num_fds() for p in family), shared

    assert under_load(graph, lambda: cycles(2), at_once=8).faults == []
    graph.wait_state()
    before, memory = held(), sum(p.memory_info().rss for p in graph.family())
    tally = under_load(graph, lambda: cycles(20), at_once=8)
    record_property("streams", tally.num_good + len(tally.faults))
    record_property("failed or other text", len(tally.faults))
    record_property("longest pause, s", round(tally.longest_pause_s, 1))
    assert tally.faults == []
    graph.wait_state()
    after = held()
    assert after[0] == before[0]
    assert after[1] <= before[1] + 10
    assert after[2] <= before[2]
    assert sum(p.memory_info().rss for p in graph.family()) < memory * 1.1
    assert graph.metric("headrace_kv_blocks_used") == 0


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_streams_longer_than_the_drain_are_handed_over(tmp_path: Path) -> None:
    """K02: at the deadline the running sequences of a worker or a processor that leaves go on elsewhere."""
    sets = {**FAKE, "decode.fake.step_ms": 100, "decode.replicas": 2, "processor.replicas": 2}
    with serving("graph/disagg.py", log=tmp_path / "serve.log", sets=sets) as graph:
        requests = bodies(16, max_tokens=400)
        expected = asyncio.run(run_streams(graph.url, requests))
        for node in ("decode", "processor"):

            async def shrink(node: str = node) -> None:
                await asyncio.sleep(1.0)
                await command(graph, "scale", f"{node}=1")

            assert faults(asyncio.run(run_streams(graph.url, requests, shrink)), expected) == []
