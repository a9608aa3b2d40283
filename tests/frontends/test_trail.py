"""The trail of a reply: what was noted is read back, and another processor goes on behind it to the byte."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_worker import COUNT15_IDS, SCRIPT, FakeWorker
from frontend_fakes import until
from served import Answer, Served, serve

from components.messages import Timing, TokenChunk, TokenLogprobs, pack_ids
from frontends.messages import HttpBody, HttpHead
from frontends.trail import Step, Trail, read_trail
from graph import ProtocolFault

FULL = TokenChunk(pack_ids([1, 2]), (TokenLogprobs(-0.5, (1,), (-0.5,)),) * 2, "stop", 16, Timing("decode/0"))


def test_steps_are_read_back_in_order() -> None:
    trail = Trail()
    trail.note(0, TokenChunk(pack_ids([7])))
    trail.note(3, FULL)
    trail.close()

    first, second, last = read_trail(trail.take())
    assert (first.choice, first.chunk) == (0, TokenChunk(pack_ids([7])))
    assert (second.choice, second.chunk) == (3, FULL)
    assert last.is_closing
    assert trail.take() == b""
    assert list(read_trail(b"")) == []


def test_a_plain_token_costs_a_dozen_bytes() -> None:
    trail = Trail()
    trail.note(0, TokenChunk(pack_ids([40_000])))
    assert len(trail.take()) <= 12


@pytest.mark.parametrize("broken", [b"\1", b"\1\0\0\0", b"\2\0\0\0\xc1\xc1"])
def test_what_is_no_trail_is_a_fault(broken: bytes) -> None:
    with pytest.raises(ProtocolFault):
        list(read_trail(broken))


class Recorded(Answer):
    """An answer that also keeps each body with its trail, as the ingress does."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[HttpBody] = []

    def on_item(self, item: HttpHead | HttpBody) -> None:
        super().on_item(item)
        if isinstance(item, HttpBody) and item.data:
            self.bodies.append(item)


REQUESTS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"n": 3, "temperature": 0.9},
    {"stop": ["24"], "logprobs": 1},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"echo": True},
    {"prompt": ["a", "b c d"], "max_tokens": 9},
]
"""Streams of every form that a reply can take."""


@pytest.mark.parametrize("fields", REQUESTS, ids=lambda fields: "-".join(fields) or "plain")
def test_taken_over_anywhere_the_reply_is_the_same_to_the_byte(fields: dict[str, Any]) -> None:
    body = {"prompt": COUNT15_IDS, "max_tokens": 24, "temperature": 0, "seed": 5, "stream": True, **fields}

    async def test(served: Served) -> None:
        whole = await _ask(served, body)
        pieces = [piece.data for piece in whole.bodies]
        for cut in range(1, len(pieces) + 1):
            trail = b"".join(piece.trail for piece in whole.bodies[:cut])
            rest = await _ask(served, body, trail=trail, attempt=1)
            assert rest.head is None, "the client has its head already"
            assert b"".join(pieces[:cut]) + rest.body == b"".join(pieces), f"cut after {cut} of {len(pieces)}"

    serve(test, FakeWorker(SCRIPT))


def test_a_taken_over_request_that_fails_ends_in_an_event() -> None:
    async def test(served: Served) -> None:
        trail = Trail()
        trail.note(0, TokenChunk(pack_ids([33])))
        gone = await _ask(served, {"prompt": "a", "stream": True}, trail=trail.take())
        assert gone.body.startswith(b'data: {"error"')
        broken = await _ask(served, {"prompt": "a", "stream": True}, trail=b"\2\0\0\0\xc1\xc1")
        assert b"protocol_fault" in broken.body

    worker = FakeWorker()
    worker.fails_after = 0
    serve(test, worker)


def test_a_trail_of_another_request_is_a_fault() -> None:
    async def test(served: Served) -> None:
        trail = Trail()
        trail.note(5, TokenChunk(pack_ids([33])))
        assert b"names choice 5" in (await _ask(served, {"prompt": "a", "stream": True}, trail=trail.take())).body

    serve(test, FakeWorker())


def test_the_same_entropy_gives_the_same_seeds_to_every_processor() -> None:
    async def test(served: Served) -> None:
        body = {"prompt": "a", "n": 2, "max_tokens": 1}
        for entropy in (77, 77, 78):
            await _ask(served, body, entropy=entropy)
        seeds = [request.sampling.seed for request in worker.requests]
        assert seeds[:2] == seeds[2:4]
        assert len(set(seeds)) == 4

    worker = FakeWorker()
    serve(test, worker)


def test_steps_without_text_wait_for_the_next_bytes() -> None:
    async def test(served: Served) -> None:
        answer = await _ask(served, {"prompt": COUNT15_IDS, "max_tokens": 12, "stream": True, "stop": ["16, 17, x"]})
        assert sum(len(list(read_trail(piece.trail))) for piece in answer.bodies) == 13
        assert len(answer.bodies) < 12

    serve(test, FakeWorker(SCRIPT))


async def _ask(served: Served, body: dict[str, Any], **fields: Any) -> Recorded:
    answer = Recorded()
    served.start("POST", "/v1/completions", {"temperature": 0, **body}, answer=answer, **fields)
    await until(answer.ended.is_set, timeout_s=10)
    await asyncio.sleep(0)
    return answer


def test_a_step_tells_its_defaults() -> None:
    assert Step(1).chunk == TokenChunk(b"")
