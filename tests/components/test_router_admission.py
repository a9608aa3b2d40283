"""Admission: full workers, waiting by priority, shedding."""

from __future__ import annotations

import asyncio

import pytest
from router_bench import Bench, FakeStream

from components.messages import Load, LoadChanged, Placement, PlacementQueued
from graph import NoPeer, Overloaded


async def full_bench(**options: object) -> tuple[Bench, FakeStream]:
    """One worker that takes one request, and has it."""
    bench = await Bench().start("kv", max_worker_requests=1, **options)
    bench.worker("worker/0")
    return bench, bench.ask()[1]


def placed(stream: FakeStream) -> bool:
    return isinstance(stream.sent[-1], Placement) if stream.sent else False


async def test_a_request_waits_until_a_worker_has_room() -> None:
    bench, running = await full_bench()
    waiting = bench.open()
    assert waiting.sent == [PlacementQueued(5.0)]
    assert bench.metric("headrace_router_waiting") == 1
    running.close()
    assert placed(waiting)
    assert bench.metric("headrace_router_waiting") == 0
    waiting.close()
    assert bench.metric("headrace_router_live_placements") == 0


async def test_the_higher_priority_goes_first_and_equals_by_arrival() -> None:
    bench, running = await full_bench()
    low, high, also_high = (bench.open(priority=p) for p in (0, 5, 5))
    running.close()
    assert (placed(low), placed(high), placed(also_high)) == (False, True, False)
    high.close()
    also_high.close()
    assert placed(low)


async def test_a_request_that_waits_too_long_is_shed_with_a_hint() -> None:
    bench, _ = await full_bench(max_wait_s=0.02)
    waiting = bench.open(disagg_request_id=7)
    await asyncio.sleep(0.1)
    assert isinstance(waiting.error, Overloaded)
    assert waiting.error.retry_after_s
    assert bench.metric("headrace_router_shed_total", reason="timeout") == 1
    assert bench.open(disagg_request_id=7).error is None  # its label is free again


async def test_a_full_queue_sheds_whoever_is_last_in_order() -> None:
    bench, _ = await full_bench(max_waiting=1)
    low = bench.open(priority=0)
    with pytest.raises(Overloaded, match=r"^no worker has room, with 1 request waiting$"):
        bench.open(priority=0)
    high = bench.open(priority=1)
    assert isinstance(low.error, Overloaded)
    assert high.error is None
    assert bench.metric("headrace_router_shed_total", reason="queue_full") == 2


async def test_no_queue_at_all_sheds_at_once() -> None:
    bench, _ = await full_bench(max_waiting=0)
    with pytest.raises(Overloaded, match=r"^no worker has room, with 0 requests waiting$") as caught:
        bench.open()
    assert caught.value.retry_after_s


async def test_whoever_leaves_the_queue_is_not_placed() -> None:
    bench, running = await full_bench()
    leaving, staying = bench.open(), bench.open()
    leaving.close()
    running.close()
    assert not placed(leaving)
    assert placed(staying)


async def test_reported_requests_count_and_their_end_makes_room() -> None:
    bench = await Bench().start("kv", max_worker_requests=2)
    worker = bench.worker("worker/0", load=Load(running=1, waiting=1, blocks_total=100))
    waiting = bench.open()
    assert not placed(waiting)
    bench.tell(worker, LoadChanged(Load(running=1, blocks_total=100)))
    assert placed(waiting)


async def test_a_request_that_failed_elsewhere_was_admitted_before() -> None:
    bench, _ = await full_bench()
    bench.worker("worker/1")
    bench.ask()
    assert bench.ask(exclude=("worker/1",))[0].worker == "worker/0"


async def test_those_who_wait_are_told_when_the_last_worker_goes() -> None:
    bench, _ = await full_bench()
    waiting = bench.open()
    bench.context.subscription.on_lost(bench.worker("worker/0"))
    assert isinstance(waiting.error, NoPeer)


async def test_a_worker_that_joins_takes_those_who_wait() -> None:
    bench, _ = await full_bench()
    waiting = bench.open()
    bench.worker("worker/1")
    assert placed(waiting)
