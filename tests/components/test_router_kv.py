"""The policy `kv` as processors and workers see it: caches, bursts, loads, lost workers, explanations."""

from __future__ import annotations

from collections import Counter

from router_bench import UNIT, Bench, make_hashes

from components.messages import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Explanation,
    Load,
    LoadChanged,
    Placement,
)


async def test_a_request_goes_where_its_blocks_are() -> None:
    bench = await Bench().start("kv")
    bench.worker("worker/0")
    bench.worker("worker/1", hashes=make_hashes(1, 50))
    bench.worker("worker/2", hashes=make_hashes(1, 20))
    placement, _ = bench.ask(hashes=make_hashes(1, 60))
    assert (placement.worker, placement.overlap_blocks) == ("worker/1", 50)


async def test_a_worker_that_is_too_busy_is_passed_over() -> None:
    bench = await Bench().start("kv")
    bench.worker("worker/0")
    cached = bench.worker("worker/1", hashes=make_hashes(1, 50))
    bench.tell(cached, LoadChanged(Load(running=40, blocks_total=1_000)))
    assert bench.ask(hashes=make_hashes(1, 50))[0].worker == "worker/0"


async def test_events_move_requests_to_where_the_blocks_are_now() -> None:
    bench = await Bench().start("kv")
    one, two = bench.worker("worker/0"), bench.worker("worker/1")
    hashes = make_hashes(1, 50)
    for holder, other in ((one, two), (two, one)):
        bench.tell(holder, BlocksStored(bytes(16), hashes))
        bench.tell(other, BlocksRemoved(hashes))
        placement, stream = bench.ask(hashes=hashes)
        assert (placement.worker, placement.overlap_blocks) == (holder.id, 50)
        stream.close()
    bench.tell(two, BlocksCleared())
    assert bench.ask(hashes=hashes)[0].overlap_blocks == 0


async def test_without_overlap_the_least_busy_worker_is_chosen() -> None:
    bench = await Bench().start("kv")
    for i, running in enumerate((3, 1, 2)):
        bench.worker(f"worker/{i}", load=Load(running=running, blocks_total=1_000))
    assert bench.ask(hashes=make_hashes(1, 10))[0].worker == "worker/1"


async def test_a_burst_of_equal_prompts_stays_together_before_any_event() -> None:
    bench = await Bench().start("kv")
    for i in range(4):
        bench.worker(f"worker/{i}")
    placements = [bench.ask(hashes=make_hashes(1, 100))[0] for _ in range(8)]
    assert len({placement.worker for placement in placements}) == 1
    assert [placement.overlap_blocks for placement in placements] == [0] + [100] * 7


async def test_a_large_burst_of_equal_prompts_does_not_pile_up_on_one_worker() -> None:
    bench = await Bench().start("kv")
    for i in range(4):
        bench.worker(f"worker/{i}")
    taken = Counter(bench.ask(hashes=make_hashes(1, 100))[0].worker for _ in range(64))
    assert len(taken) == 4
    assert max(taken.values()) <= 32


async def test_what_a_placement_would_have_brought_is_not_expected_after_its_end() -> None:
    bench = await Bench().start("kv")
    bench.worker("worker/0")
    bench.worker("worker/1")
    _, stream = bench.ask(hashes=make_hashes(1, 100))
    assert bench.ask(hashes=make_hashes(1, 100))[0].overlap_blocks == 100
    stream.close()
    assert bench.ask(hashes=make_hashes(2, 100))[0].overlap_blocks == 0


async def test_different_prompts_spread_over_idle_workers() -> None:
    bench = await Bench().start("kv")
    for i in range(4):
        bench.worker(f"worker/{i}")
    taken = [bench.ask(hashes=make_hashes(n, 100))[0].worker for n in range(8)]
    assert Counter(taken) == {f"worker/{i}": 2 for i in range(4)}


async def test_new_documents_go_where_the_cache_is_emptiest() -> None:
    bench = await Bench().start("kv")
    for i in range(4):
        bench.worker(f"worker/{i}", hashes=make_hashes(i, 500 - 100 * i))
    assert bench.ask(hashes=make_hashes(9, 100))[0].worker == "worker/3"


async def test_prefill_and_decode_are_chosen_each_by_its_own_cache() -> None:
    bench = await Bench().start("kv")
    for role in ("prefill", "decode"):
        for i in range(2):
            is_warm = (role, i) in (("prefill", 1), ("decode", 0))
            bench.worker(f"{role}/{i}", role, hashes=make_hashes(1, 60) if is_warm else b"")
    placement, _ = bench.ask(hashes=make_hashes(1, 90))
    assert (placement.worker, placement.prefill) == ("decode/0", "prefill/1")
    assert (placement.overlap_blocks, placement.prefill_overlap_blocks) == (60, 60)


async def test_a_prefill_worker_has_nothing_before_it_once_decode_has_the_prompt() -> None:
    bench = await Bench().start("kv")
    decode = bench.worker("decode/0", "decode")
    for i in range(2):
        bench.worker(f"prefill/{i}", "prefill")
    hashes = make_hashes(1, 100)
    first = bench.ask(hashes=hashes)[0].prefill
    assert bench.ask(hashes=make_hashes(2, 100))[0].prefill != first  # it has a queue
    bench.tell(decode, BlocksStored(bytes(16), hashes))  # prefilled locally after all
    explanation = explain(bench, make_hashes(3, 100))
    queued = {worker.worker: worker.terms["queued"] for worker in explanation.workers}
    assert first is not None
    assert queued[first] == 0


async def test_a_restarted_worker_is_credited_with_nothing() -> None:
    bench = await Bench().start("kv")
    old = bench.worker("worker/0", boot="b1", hashes=make_hashes(1, 50))
    bench.worker("worker/1", hashes=make_hashes(1, 10))
    bench.context.subscription.on_lost(old)
    bench.worker("worker/0", boot="b2")
    placement, _ = bench.ask(hashes=make_hashes(1, 50))
    assert (placement.worker, placement.overlap_blocks) == ("worker/1", 10)
    assert bench.metric("headrace_router_worker_blocks", worker="worker/0") == 0


async def test_a_snapshot_replaces_the_old_view_at_once() -> None:
    bench = await Bench().start("kv")
    bench.worker("worker/0", hashes=make_hashes(1, 50))
    bench.worker("worker/0", hashes=make_hashes(2, 30))
    assert bench.ask(hashes=make_hashes(1, 50))[0].overlap_blocks == 0
    assert bench.ask(hashes=make_hashes(2, 50))[0].overlap_blocks == 30
    assert bench.metric("headrace_router_index_blocks") == 30


async def test_a_new_router_sees_the_load_it_did_not_place() -> None:
    bench = await Bench().start("kv")
    bench.worker("worker/0", load=Load(running=5, prefill_tokens=3_000, blocks_total=1_000))
    bench.worker("worker/1", load=Load(running=5, blocks_total=1_000))
    assert bench.ask(hashes=make_hashes(1, 10))[0].worker == "worker/1"


async def test_the_index_reports_its_size_and_what_it_left_out() -> None:
    bench = await Bench().start("kv", max_indexed_blocks=40)
    bench.worker("worker/0", hashes=make_hashes(1, 50))
    assert bench.metric("headrace_router_index_blocks") == 40
    assert bench.metric("headrace_router_index_dropped_blocks") == 10
    assert (bench.metric("headrace_router_index_bytes") or 0) > 40 * 50


def explain(bench: Bench, hashes: bytes) -> Explanation:
    [told] = bench.open(hashes=hashes, is_explained=True).sent
    assert isinstance(told, Explanation)
    return told


async def test_an_explanation_tells_every_workers_cost_and_places_nothing() -> None:
    bench = await Bench().start("kv", max_worker_requests=8)
    bench.worker("worker/0", hashes=make_hashes(1, 50))
    bench.worker("worker/1", load=Load(running=8, blocks_total=1_000))
    told = explain(bench, make_hashes(1, 60))
    assert isinstance(told.placement, Placement)
    assert told.placement.worker == "worker/0"
    first, second = told.workers
    assert (first.cached_blocks, first.overlap_blocks, first.is_full) == (50, 50, False)
    assert (second.cached_blocks, second.overlap_blocks, second.is_full) == (0, 0, True)
    assert first.cost == sum(first.terms.values()) < second.cost
    assert first.terms["missing"] == 2.0 * (10 * UNIT + 1)
    assert bench.metric("headrace_router_live_placements") == 0
    assert explain(bench, make_hashes(1, 60)).workers == told.workers
