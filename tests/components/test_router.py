"""The router as its processors and workers see it, with fake links."""

from __future__ import annotations

import pytest
from router_bench import Bench

from components.messages import BlocksCleared, Load, LoadChanged
from graph import NoPeer, Peer, Refused


async def test_without_workers_a_request_is_told_to_come_back() -> None:
    bench = await Bench().start()
    with pytest.raises(NoPeer) as caught:
        bench.ask()
    assert caught.value.retry_after_s
    assert bench.metric("headrace_router_refused_total", reason="no_worker") == 1


async def test_prefill_workers_alone_serve_nothing() -> None:
    bench = await Bench().start()
    bench.worker("prefill/0", "prefill")
    with pytest.raises(NoPeer):
        bench.ask()


async def test_round_robin_takes_each_in_turn() -> None:
    bench = await Bench().start("round_robin")
    for i in range(3):
        bench.worker(f"worker/{i}")
    assert [bench.ask()[0].worker for _ in range(4)] == ["worker/0", "worker/1", "worker/2", "worker/0"]


async def test_least_busy_counts_placements_until_their_stream_ends() -> None:
    bench = await Bench().start()
    bench.worker("worker/0")
    bench.worker("worker/1")
    first, first_stream = bench.ask()
    second, _ = bench.ask()
    assert {first.worker, second.worker} == {"worker/0", "worker/1"}
    first_stream.close()
    assert bench.ask()[0].worker == first.worker
    assert bench.metric("headrace_router_live_placements") == 2


async def test_least_busy_counts_the_reported_load() -> None:
    bench = await Bench().start()
    busy = bench.worker("worker/0")
    bench.worker("worker/1")
    bench.context.subscription.on_event(busy, LoadChanged(Load(running=2, waiting=1)))
    assert [bench.ask()[0].worker for _ in range(2)] == ["worker/1", "worker/1"]
    bench.context.subscription.on_event(busy, LoadChanged(Load()))
    assert bench.ask()[0].worker == "worker/0"


async def test_equally_busy_workers_are_all_taken_sometimes() -> None:
    bench = await Bench().start()
    for i in range(3):
        bench.worker(f"worker/{i}")
    taken = set()
    for _ in range(100):
        placement, stream = bench.ask()
        taken.add(placement.worker)
        stream.close()
    assert taken == {"worker/0", "worker/1", "worker/2"}


async def test_a_decode_worker_gets_the_prefill_worker_with_the_fewest_tokens_before_it() -> None:
    bench = await Bench().start()
    bench.worker("decode/0", "decode")
    bench.worker("prefill/0", "prefill", load=Load(prefill_tokens=500))
    bench.worker("prefill/1", "prefill")
    assert bench.ask(num_tokens=400)[0].prefill == "prefill/1"
    assert bench.ask(num_tokens=400)[0].prefill == "prefill/1"  # 400 placed just now, not reported yet
    assert bench.ask()[0].prefill == "prefill/0"


async def test_without_a_prefill_worker_decode_computes_the_prompt() -> None:
    bench = await Bench().start()
    bench.worker("decode/0", "decode")
    prefill = bench.worker("prefill/0", "prefill")
    assert bench.ask()[0].prefill == "prefill/0"
    bench.context.subscription.on_lost(prefill)
    placement, _ = bench.ask()
    assert placement.prefill is None
    assert "no prefill worker" in placement.reason


async def test_an_aggregated_worker_gets_no_prefill_worker() -> None:
    bench = await Bench().start()
    bench.worker("worker/0")
    bench.worker("prefill/0", "prefill")
    assert bench.ask()[0].prefill is None


async def test_who_failed_the_request_is_left_out() -> None:
    bench = await Bench().start()
    bench.worker("decode/0", "decode")
    bench.worker("decode/1", "decode")
    bench.worker("prefill/0", "prefill")
    for _ in range(3):
        placement, _ = bench.ask(exclude=("decode/0", "prefill/0"))
        assert (placement.worker, placement.prefill) == ("decode/1", None)
    with pytest.raises(NoPeer):
        bench.ask(exclude=("decode/0", "decode/1"))


async def test_a_boot_can_be_left_out_without_its_next_life() -> None:
    bench = await Bench().start("round_robin")
    bench.worker("worker/0", boot="b1")
    bench.worker("worker/1")
    assert bench.ask(exclude=("worker/0-b1",))[0].worker == "worker/1"
    bench.worker("worker/0", boot="b2")
    assert {bench.ask(exclude=("worker/0-b1",))[0].worker for _ in range(2)} == {"worker/0", "worker/1"}


async def test_a_worker_that_is_lost_is_not_chosen_and_its_next_life_starts_empty() -> None:
    bench = await Bench().start()
    old = bench.worker("worker/0", boot="b1")
    streams = [bench.ask()[1] for _ in range(5)]
    bench.context.subscription.on_lost(old)
    bench.worker("worker/1")
    assert bench.ask()[0].worker == "worker/1"
    bench.worker("worker/0", boot="b2")
    assert bench.ask()[0].worker == "worker/0"
    for stream in streams:
        stream.close()
    assert bench.metric("headrace_router_live_placements") == 2


async def test_block_events_and_loads_of_unknown_workers_are_harmless() -> None:
    bench = await Bench().start()
    bench.context.subscription.on_event(Peer("worker/9", "b", "ipc://"), LoadChanged(Load(running=1)))
    peer = bench.worker("worker/0")
    bench.context.subscription.on_event(peer, BlocksCleared())
    assert bench.ask()[0].worker == "worker/0"


async def test_a_clients_label_is_used_as_it_is_and_refused_while_another_request_has_it() -> None:
    bench = await Bench().start()
    bench.worker("worker/0")
    placement, stream = bench.ask("a", disagg_request_id=42)
    assert placement.disagg_request_id == 42
    with pytest.raises(Refused) as caught:
        bench.ask("b", disagg_request_id=42)
    assert caught.value.code == "conflict"
    stream.close()
    assert bench.ask("b", disagg_request_id=42)[0].disagg_request_id == 42


async def test_a_refused_request_keeps_neither_label_nor_count() -> None:
    bench = await Bench().start()
    with pytest.raises(NoPeer):
        bench.ask("a", disagg_request_id=7)
    bench.worker("worker/0")
    assert bench.ask("b", disagg_request_id=7)[0].disagg_request_id == 7


@pytest.mark.parametrize("label", [None, 0, -5])
async def test_a_label_is_minted_where_the_client_gave_no_positive_one(label: int | None) -> None:
    bench = await Bench().start()
    bench.worker("worker/0")
    labels = [bench.ask(f"r{i}", disagg_request_id=label)[0].disagg_request_id for i in range(100)]
    assert len(set(labels)) == 100
    assert all(0 < minted < 1 << 63 for minted in labels)
