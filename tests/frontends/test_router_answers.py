"""What a router may say beside a placement: that all workers are full, that it sheds, how it would decide."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_worker import COUNT15_IDS, SCRIPT, FakeWorker
from served import Served, serve

from components.kv.hashing import chain_hashes, root_hash
from components.messages import Explanation, Load, Placement, PlacementQueued, PlacementRequest, WorkerCost, pack_ids
from graph import Overloaded

EXPLANATION = Explanation(
    policy="kv",
    hash_unit=16,
    placement=Placement("decode/0", "prefill/1", overlap_blocks=2, prefill_overlap_blocks=1, reason="least cost"),
    workers=(WorkerCost("decode/0", "decode", Load(running=3), 4, 2, 2, False, 20.04, {"missing": 20.04}),),
)


def test_a_router_whose_workers_are_full_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontends.placement.ROUTER_TIMEOUT_S", 0.05)

    async def router(request: PlacementRequest, stream: Any) -> None:
        stream.send(PlacementQueued(5.0))
        await asyncio.sleep(0.2)
        stream.send(Placement("decode/1"))

    async def test(served: Served) -> None:
        assert (await served.complete(max_tokens=4)).status == 200
        assert (len(first.requests), len(second.requests)) == (0, 1)

    first, second = FakeWorker(SCRIPT), FakeWorker(SCRIPT, name="decode/1")
    serve(test, first, second, router=router, hash_unit=16)


def test_a_router_that_waits_longer_than_it_said_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontends.placement.ROUTER_TIMEOUT_S", 0.05)

    async def test(served: Served) -> None:
        assert (await served.complete(max_tokens=4)).status == 200
        assert len(worker.requests) == 1

    worker = FakeWorker(SCRIPT)
    serve(test, worker, router=lambda request, stream: stream.send(PlacementQueued(0.05)), hash_unit=16)


def test_a_shed_request_is_not_placed_behind_the_routers_back() -> None:
    def router(request: PlacementRequest, stream: Any) -> None:
        stream.send(PlacementQueued(5.0))
        stream.fail(
            Overloaded("no worker has room, with 1 request waiting", code="rate_limit_exceeded", retry_after_s=7.2)
        )

    async def test(served: Served) -> None:
        reply = await served.complete(max_tokens=4)
        assert (reply.status, reply.headers["retry-after"]) == (429, "7")
        assert reply.json["error"]["code"] == "rate_limit_exceeded"
        message = "The workers are busy: no worker has room, with 1 request waiting; try again."
        assert reply.json["error"]["message"] == message
        assert worker.requests == []

    worker = FakeWorker(SCRIPT)
    serve(test, worker, router=router, hash_unit=16)


def test_an_explanation_is_of_the_prompt_as_the_workers_would_see_it() -> None:
    asked: list[PlacementRequest] = []

    def router(request: PlacementRequest, stream: Any) -> None:
        asked.append(request)
        stream.end(EXPLANATION)

    async def test(served: Served) -> None:
        told = (await served.ask("/router/explain", {"prompt": COUNT15_IDS})).json
        assert (told["policy"], told["prompt_tokens"], told["prompt_blocks"]) == ("kv", 50, 3)
        assert told["choice"]["worker"] == "decode/0"
        assert told["choice"]["prefill_worker"] == "prefill/1"
        assert told["workers"][0]["load"]["running"] == 3
        assert told["workers"][0]["terms"] == {"missing": 20.0}
        hashes = chain_hashes(pack_ids(COUNT15_IDS), 16, parent=root_hash())
        assert (asked[0].hashes, asked[0].num_tokens, asked[0].is_explained) == (b"".join(hashes), 50, True)
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await served.ask("/router/explain", chat)).status == 200
        assert asked[1].num_tokens > 10  # the template's tokens as well
        assert worker.requests == []

    worker = FakeWorker(SCRIPT)
    serve(test, worker, router=router, hash_unit=16)


def test_a_router_that_does_not_explain_is_told_of() -> None:
    async def test(served: Served) -> None:
        reply = await served.ask("/router/explain", {"prompt": COUNT15_IDS})
        assert (reply.status, reply.json["error"]["code"]) == (501, "not_explained")

    serve(test, FakeWorker(SCRIPT), router=lambda request, stream: stream.send(Placement("decode/0")), hash_unit=16)


def test_without_a_router_there_is_nothing_to_explain() -> None:
    async def test(served: Served) -> None:
        reply = await served.ask("/router/explain", {"prompt": COUNT15_IDS})
        assert (reply.status, reply.json["error"]["code"]) == (503, "no_router")

    serve(test, FakeWorker(SCRIPT))


def test_predicted_and_actual_overlap_are_counted_side_by_side() -> None:
    def router(request: PlacementRequest, stream: Any) -> None:
        stream.send(Placement("decode/0", overlap_blocks=2))

    async def test(served: Served) -> None:
        await served.ask("/v1/completions", {"prompt": COUNT15_IDS, "max_tokens": 4})
        sample = served.context.metrics.get_sample_value
        actual = sample("headrace_overlap_actual_tokens_total", {"worker": "decode/0"})
        assert sample("headrace_overlap_predicted_tokens_total", {"worker": "decode/0"}) == 32
        assert actual is not None
        assert sample("headrace_overlap_error_tokens_sum") == abs(32 - actual)

    serve(test, FakeWorker(SCRIPT), router=router, hash_unit=16)
