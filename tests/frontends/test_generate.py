"""Placement and recovery: which worker gets a request, and what happens when one fails it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_worker import COUNT15_IDS, SCRIPT, FakeWorker
from frontend_fakes import until
from served import COUNT_TEXT, Served, serve

from components.kv.hashing import chain_hashes, root_hash
from components.messages import Placement, PlacementRequest, pack_ids, unpack_ids
from graph import DeadlineExceeded, LinkError, NoPeer, Overloaded, PeerLost, Refused


class FakeRouter:
    """Names one worker until told otherwise."""

    def __init__(self, placement: Placement | LinkError | None) -> None:
        self.placement = placement
        self.requests: list[PlacementRequest] = []
        self.num_held = 0

    def __call__(self, request: PlacementRequest, stream: Any) -> None:
        self.requests.append(request)
        if isinstance(self.placement, LinkError):
            stream.fail(self.placement)
        elif self.placement is not None:
            self.num_held += 1
            stream.on_cancel(self._released)
            stream.send(self.placement)

    def _released(self) -> None:
        self.num_held -= 1


def two_workers() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker(SCRIPT), FakeWorker(SCRIPT, name="decode/1")


def test_router_chooses_and_its_stream_lives_as_long_as_the_request() -> None:
    async def test(served: Served) -> None:
        first.pause_s = second.pause_s = 0.001
        answer = served.start("POST", "/v1/completions", {"prompt": COUNT15_IDS, "max_tokens": 20, "cache_salt": "s"})
        await until(lambda: second.num_running > 0)
        assert router.num_held == 1
        await answer.ended.wait()
        await asyncio.sleep(0.01)
        assert router.num_held == 0
        assert first.requests == []
        assert (second.requests[0].prefill, second.requests[0].disagg_request_id) == ("prefill/3", 77)
        asked = router.requests[0]
        hashes = chain_hashes(pack_ids(COUNT15_IDS), 16, parent=root_hash("s"))
        assert (asked.hashes, asked.num_tokens, asked.max_tokens) == (b"".join(hashes), 50, 20)

    first, second = two_workers()
    router = FakeRouter(Placement("decode/1", "prefill/3", 77))
    serve(test, first, second, router=router, hash_unit=16)


def test_client_that_leaves_releases_the_placement() -> None:
    async def test(served: Served) -> None:
        answer = served.start("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2000})
        await until(lambda: worker.num_running > 0)
        assert answer.call is not None
        answer.call.cancel()
        await asyncio.sleep(0.01)
        assert (router.num_held, worker.num_running) == (0, 0)

    worker = FakeWorker()
    worker.pause_s = 0.001
    router = FakeRouter(Placement("decode/0"))
    serve(test, worker, router=router, hash_unit=16)


@pytest.mark.parametrize("answer", [None, NoPeer("no workers known"), Placement("decode/9")])
def test_without_a_useful_router_the_least_busy_worker_serves(
    answer: Placement | LinkError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontends.placement.ROUTER_TIMEOUT_S", 0.05)

    async def test(served: Served) -> None:
        for _ in range(2):
            assert (await served.complete(max_tokens=4)).json["choices"][0]["text"] == " 16,"
        assert len(first.requests) == len(second.requests) == 1
        if answer is None:
            assert len(router.requests) == 1  # a silent router is not asked again for a while

    first, second = two_workers()
    router = FakeRouter(answer)
    serve(test, first, second, router=router, hash_unit=16)


def test_unlinked_router_balances_by_open_streams() -> None:
    async def test(served: Served) -> None:
        first.pause_s = second.pause_s = 0.01
        await asyncio.gather(*(served.complete(max_tokens=4) for _ in range(6)))
        assert len(first.requests) == len(second.requests) == 3

    first, second = two_workers()
    serve(test, first, second)


@pytest.mark.parametrize("error", [PeerLost("died"), DeadlineExceeded("silent"), Overloaded("full"), NoPeer("gone")])
@pytest.mark.parametrize("stream", [False, True])
def test_failed_worker_is_replaced_without_gap_or_repeat(error: LinkError, stream: bool) -> None:
    async def test(served: Served) -> None:
        first.fails_after, first.failure = 5, error
        reply = await served.complete(max_tokens=60, stream=stream, seed=5, logprobs=1)
        text = reply.text() if stream else reply.json["choices"][0]["text"]
        assert text == COUNT_TEXT[: len(text)]
        assert len(text) > 50
        if not stream:
            assert reply.json["usage"]["completion_tokens"] == 60
            assert len(reply.json["choices"][0]["logprobs"]["tokens"]) == 60
        before, after = first.requests[0], second.requests[0]
        assert after.num_prompt_tokens == 50
        assert unpack_ids(after.tokens)[50:] == SCRIPT[tuple(COUNT15_IDS)][:5]
        assert (after.sampling, after.stopping) == (before.sampling, before.stopping)
        assert after.id != before.id

    first, second = two_workers()
    serve(test, first, second)


def test_worker_that_dies_is_excluded_at_the_router() -> None:
    async def test(served: Served) -> None:
        first.fails_after, first.failure = 5, PeerLost("died")
        boot = served.workers.peers["decode/0"].boot
        reply = await served.complete(max_tokens=8)
        assert reply.json["choices"][0]["text"] == COUNT_TEXT[:8]
        assert [r.exclude for r in router.requests] == [(), (boot,)]
        assert (router.requests[1].num_tokens, router.requests[1].max_tokens) == (55, 3)

    first = FakeWorker(SCRIPT)
    router = FakeRouter(Placement("decode/0"))

    async def with_second(served: Served) -> None:
        served.workers.serve("decode/1", FakeWorker(SCRIPT, name="decode/1"))
        original = router.__call__

        def call(request: PlacementRequest, stream: Any) -> None:
            router.placement = Placement("decode/1" if request.exclude else "decode/0")
            original(request, stream)

        served.router.serve("router/0", call)
        await test(served)

    serve(with_second, first, router=router, hash_unit=16)


def test_attempts_are_bounded() -> None:
    async def test(served: Served) -> None:
        reply = await served.complete(max_tokens=60)
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
        assert sum(len(worker.requests) for worker in workers) == 3

    workers = [FakeWorker(SCRIPT, name=f"decode/{i}") for i in range(5)]
    for worker in workers:
        worker.fails_after, worker.failure = 2, PeerLost("died")
    serve(test, *workers)


def test_stream_waits_for_its_restarted_worker() -> None:
    async def test(served: Served) -> None:
        first.pause_s = 0.002
        answer = served.start(
            "POST", "/v1/completions", {"prompt": COUNT15_IDS, "max_tokens": 40, "stream": True, "temperature": 0}
        )
        await until(lambda: first.num_steps >= 5)
        served.workers.kill("decode/0")
        await asyncio.sleep(0.05)
        served.workers.serve("decode/0", FakeWorker(SCRIPT))
        async with asyncio.timeout(5):
            await answer.ended.wait()
        assert answer.text() == COUNT_TEXT[: len(answer.text())]
        assert answer.reasons() == [(0, "length")]

    first = FakeWorker(SCRIPT)
    serve(test, first)


def test_no_worker_is_503_in_time() -> None:
    async def test(served: Served) -> None:
        started = asyncio.get_running_loop().time()
        reply = await served.complete(stream=True)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert reply.json["error"]["code"] == "no_worker"
        assert asyncio.get_running_loop().time() - started < 1.5

    serve(test)


@pytest.mark.parametrize(
    ("refusal", "status"),
    [
        (Refused("too long", code="context_length_exceeded"), 400),
        (Refused("taken", code="conflict"), 409),
        (Overloaded("full", retry_after_s=4), 429),
    ],
)
def test_refusals_of_the_only_worker(refusal: LinkError, status: int) -> None:
    async def test(served: Served) -> None:
        started = asyncio.get_running_loop().time()
        reply = await served.complete(stream=True)
        assert reply.status == status
        assert reply.json["error"]["code"] == refusal.code
        assert reply.headers.get("retry-after") == ("4" if status == 429 else None)
        assert asyncio.get_running_loop().time() - started < 0.5

    worker = FakeWorker()
    worker.refusal = refusal
    serve(test, worker)


def test_router_refuses_a_label_in_use() -> None:
    async def test(served: Served) -> None:
        reply = await served.complete(disagg_request_id=5)
        assert (reply.status, reply.json["error"]["code"]) == (409, "conflict")
        assert router.requests[0].disagg_request_id == 5
        several = await served.complete(disagg_request_id=5, n=2)
        assert (several.status, several.json["error"]["param"]) == (400, "disagg_request_id")

    router = FakeRouter(Refused("label 5 is in use", code="conflict"))
    serve(test, FakeWorker(), router=router, hash_unit=16)


def test_label_of_a_lost_processor_is_waited_for() -> None:
    async def test(served: Served) -> None:
        answer = served.start("POST", "/v1/completions", {"prompt": "a", "disagg_request_id": 5}, attempt=1)
        await until(lambda: len(router.requests) >= 2)
        router.placement = Placement("decode/0", None, 5)
        await until(answer.ended.is_set)
        assert answer.status == 200
        assert {request.disagg_request_id for request in router.requests} == {5}

    router = FakeRouter(Refused("label 5 is in use", code="conflict"))
    serve(test, FakeWorker(), router=router, hash_unit=16)


def test_workers_that_get_on_may_fail_more_often() -> None:
    async def test(served: Served) -> None:
        reply = await served.complete(max_tokens=60)
        assert reply.status == 200
        assert reply.json["usage"]["completion_tokens"] == 60
        assert sum(len(worker.requests) for worker in workers) == 5

    workers = [FakeWorker(SCRIPT, name=f"decode/{i}") for i in range(5)]
    for worker in workers:
        worker.fails_after, worker.failure = 13, PeerLost("died")
    serve(test, *workers)


def test_one_failing_choice_ends_its_siblings() -> None:
    async def test(served: Served) -> None:
        reply = await served.complete(n=3, max_tokens=1000)
        assert reply.status == 500
        await asyncio.sleep(0.01)
        assert (worker.num_running, len(served.workers.calls)) == (0, 0)

    worker = FakeWorker()
    worker.fails_after = 3
    serve(test, worker)
