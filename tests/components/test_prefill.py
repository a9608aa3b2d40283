"""The prefill worker's prompts: announced, pinned, released; on every way out exactly once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from components.engine.outputs import ChunkComputed, Ended
from components.messages import PrefillDone, PrefillProgress, PrefillRequest, Sampling, Stopping, pack_ids, unpack_ids
from components.prefill_prompts import PrefillPrompts
from components.transfer.metrics import LeaseMetrics
from graph import Overloaded, Refused, RequestCancelled

LEASE_MS = 80


class FakeEngine:
    """Notes what it is told."""

    def __init__(self, num_blocks=64):
        self.runner = SimpleNamespace(layout=SimpleNamespace(block_size=16), num_blocks=num_blocks)
        self.calls = []

    def submit(self, request):
        self.calls.append(("submit", request.id))

    def abort(self, id):
        self.calls.append(("abort", id))

    def release(self, id):
        self.calls.append(("release", id))

    def ends(self):
        return [call for call in self.calls if call[0] != "submit"]


class FakeStream:
    """Notes what is sent."""

    def __init__(self, peer="decode/0"):
        self.peer = peer
        self.items = []
        self.error = None
        self.is_closed = False
        self._on_cancel = None

    def send(self, item):
        self.items.append(item)

    def end(self, item):
        self.items.append(item)
        self.is_closed = True

    def fail(self, error):
        if not self.is_closed:
            self.error, self.is_closed = error, True

    def on_cancel(self, callback):
        self._on_cancel = callback

    def cancel(self):
        if not self.is_closed:
            self.is_closed = True
            self._on_cancel()


class Desk:
    """Prompts over a fake engine, and the leases' metrics."""

    def __init__(self, **engine):
        self.metrics = CollectorRegistry()
        self.prompts = PrefillPrompts(metrics=LeaseMetrics(self.metrics))
        self.engine = FakeEngine(**engine)
        self.prompts.attach(self.engine, None)

    def begin(self, id="a", *, num_tokens=40, skip_tokens=16, lease_ms=LEASE_MS, stream=None):
        stream = stream or FakeStream()
        tokens = pack_ids(range(num_tokens))
        stopping = Stopping(max_tokens=5)
        self.prompts.begin(PrefillRequest(id, tokens, num_tokens, skip_tokens, Sampling(), stopping, lease_ms), stream)
        return stream

    def chunk(self, id="a", num_tokens=32, token=None):
        blocks = tuple(range(10, 10 + -(-num_tokens // 16)))
        self.prompts.on_output(ChunkComputed(id, blocks, num_tokens, 0, token))

    @property
    def expiries(self):
        return self.metrics.get_sample_value("headrace_kv_lease_expiries_total")


async def test_chunks_are_announced_cumulatively_from_the_first_block_decode_lacks():
    desk = Desk()
    stream = desk.begin()

    desk.chunk(num_tokens=32)
    desk.chunk(num_tokens=40, token=7)

    first, done = stream.items
    assert (unpack_ids(first.block_ids), first.first_token, first.num_tokens) == ([11], 16, 32)
    assert (unpack_ids(done.progress.block_ids), done.token) == ([11, 12], 7)
    assert stream.is_closed


async def test_skipping_into_the_middle_of_a_bigger_block_announces_that_block():
    desk = Desk()
    stream = desk.begin(skip_tokens=24)

    desk.chunk(num_tokens=40, token=7)

    assert stream.items[0].progress.first_token == 16


@pytest.mark.parametrize(("is_done", "end"), [(False, "abort"), (True, "release")])
async def test_a_release_frees_at_once_and_again_changes_nothing(is_done, end):
    desk = Desk()
    desk.begin()
    desk.chunk(num_tokens=40, token=7 if is_done else None)

    assert desk.prompts.release("a").held
    assert not desk.prompts.release("a").held

    assert desk.engine.ends() == [(end, "a")]


async def test_a_lease_that_is_not_renewed_ends_by_itself():
    desk = Desk()
    desk.begin()
    desk.chunk(num_tokens=40, token=7)

    await asyncio.sleep(LEASE_MS / 1e3 * 1.6)

    assert desk.engine.ends() == [("release", "a")]
    assert desk.expiries == 1
    assert not desk.prompts.renew("a", 1.0).held
    with pytest.raises(Refused, match="its lease ended"):
        desk.prompts.state("a")


async def test_a_lease_that_ends_while_it_is_computed_ends_the_computation():
    desk = Desk()
    stream = desk.begin()
    desk.chunk(num_tokens=32)

    await asyncio.sleep(LEASE_MS / 1e3 * 1.6)

    assert desk.engine.ends() == [("abort", "a")]
    assert stream.error.code == "lease_expired"


async def test_renewals_keep_it():
    desk = Desk()
    desk.begin()
    assert desk.prompts.renew("a", 0.01).held  # nothing is announced yet: there is no lease to run out
    desk.chunk(num_tokens=40, token=7)

    for _ in range(4):
        await asyncio.sleep(LEASE_MS / 2e3)
        assert desk.prompts.renew("a", LEASE_MS / 1e3).held

    assert desk.engine.ends() == []
    desk.prompts.release("a")


async def test_a_cancel_before_the_first_announcement_ends_it_at_once():
    desk = Desk()
    stream = desk.begin()

    stream.cancel()

    assert desk.engine.ends() == [("abort", "a")]


async def test_a_cancel_after_an_announcement_waits_for_the_release(monkeypatch):
    monkeypatch.setattr("components.prefill_prompts.CANCEL_GRACE_S", 0.05)
    desk = Desk()
    streams = [desk.begin("a", lease_ms=60_000), desk.begin("b", lease_ms=60_000)]
    desk.chunk("a")
    desk.chunk("b")

    for stream in streams:
        stream.cancel()
    assert desk.engine.ends() == []
    desk.prompts.release("a")
    assert desk.engine.ends() == [("abort", "a")]
    await asyncio.sleep(0.1)

    assert desk.engine.ends() == [("abort", "a"), ("abort", "b")]


async def test_a_poll_is_answered_by_the_latest_state():
    desk = Desk()
    desk.begin()

    assert desk.prompts.state("a").num_tokens == 0
    desk.chunk(num_tokens=32)
    assert isinstance(desk.prompts.state("a"), PrefillProgress)
    desk.chunk(num_tokens=40, token=7)
    assert isinstance(desk.prompts.state("a"), PrefillDone)
    desk.prompts.release("a")


async def test_an_engine_that_fails_a_prompt_ends_its_stream_and_its_lease():
    desk = Desk()
    stream = desk.begin()
    desk.chunk(num_tokens=32)

    desk.prompts.on_output(Ended("a", Overloaded("full")))

    assert isinstance(stream.error, Overloaded)
    assert not desk.prompts.release("a").held
    assert desk.engine.ends() == []


async def test_an_end_that_crosses_a_release_is_ignored():
    desk = Desk()
    desk.begin()
    desk.prompts.release("a")

    desk.prompts.on_output(Ended("a", RequestCancelled("aborted")))
    desk.chunk("a")

    assert desk.engine.ends() == [("abort", "a")]


async def test_an_id_is_taken_once():
    desk = Desk()
    stream = desk.begin()

    with pytest.raises(Refused, match="already"):
        desk.begin("a")

    assert not stream.is_closed
    desk.prompts.release("a")


async def test_a_new_start_of_a_decode_worker_ends_the_leases_of_the_old_one():
    desk = Desk()
    desk.prompts.greet("decode/0", "first")
    desk.begin("a")
    desk.begin("b", stream=FakeStream("decode/1"))
    desk.chunk("a", 40, token=7)
    desk.chunk("b", 40, token=7)

    desk.prompts.greet("decode/0", "first")
    assert desk.engine.ends() == []
    desk.prompts.greet("decode/0", "second")

    assert desk.engine.ends() == [("release", "a")]
    desk.prompts.release("b")


async def test_one_decode_worker_cannot_pin_the_whole_pool():
    desk = Desk(num_blocks=8)  # of which 6 for one decode worker
    for id in "abc":
        desk.begin(id, num_tokens=48)  # 3 blocks each
    desk.begin("d", num_tokens=48, stream=FakeStream("decode/1"))

    assert [id for _, id in desk.engine.calls] == ["a", "b", "d"]
    desk.prompts.release("a")

    assert desk.engine.calls[-1] == ("submit", "c")
    for id in "bcd":
        desk.prompts.release(id)


async def test_drain_waits_for_the_last_lease():
    desk = Desk()
    desk.begin()
    desk.chunk(num_tokens=40, token=7)
    drained = asyncio.create_task(desk.prompts.drain())

    await asyncio.sleep(0.01)
    assert not drained.done()
    desk.prompts.release("a")

    await asyncio.wait_for(drained, 1)
