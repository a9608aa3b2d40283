"""The prompts of a prefill worker: which are computed, which are pinned under a lease, and who hears of it.

`components.prefill` tells their life.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from components.disaggregation import Pace
from components.engine.outputs import ChunkComputed, Ended, EngineRequest, Output, StepReport
from components.live import Live
from components.messages import (
    TOKEN_BYTES,
    KVHandshake,
    LeaseState,
    Load,
    PrefillDone,
    PrefillProgress,
    PrefillQueue,
    PrefillRequest,
    TokenChunk,
    pack_ids,
)
from components.transfer.budget import Budget
from components.transfer.lease import LeaseTable
from components.transfer.peers import check_handshake
from graph import Refused, Stream

if TYPE_CHECKING:
    from components.engine.engine import Engine
    from components.exchange import Exchange
    from components.transfer.metrics import LeaseMetrics

CANCEL_GRACE_S = 1.0
"""How long announced blocks outlive a cancelled stream whose release does not come."""

SELF_TEST_S = 5.0
"""How long after a handshake the peer's self-test may need our progress."""

PINNED_SHARE = 0.75
"""Part of the pool that one decode worker may have pinned here."""

logger = logging.getLogger(__name__)


class _Prompt(msgspec.Struct):
    """One prompt on its way."""

    request: PrefillRequest
    stream: Stream
    arrived_s: float
    is_submitted: bool = False
    said: PrefillProgress | PrefillDone | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.request.tokens) // TOKEN_BYTES


class QueueFollowers:
    """The decode workers that want to know how long the queue is: told at once, and whenever it changes."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._told = PrefillQueue(0, 0.0)

    def add(self, stream: Stream, queue: PrefillQueue) -> None:
        """Tells one more, until it hangs up."""
        self._streams[stream.id] = stream
        stream.on_cancel(lambda: self._drop(stream.id))
        stream.send(queue)

    def tell(self, queue: PrefillQueue) -> None:
        """The queue may have changed."""
        if queue == self._told:
            return
        self._told = queue
        for stream in self._streams.values():
            stream.send(queue)

    def _drop(self, stream: str) -> None:
        self._streams.pop(stream, None)


class PrefillPrompts:
    """All prompts of one prefill worker and their leases; the engine's `Watcher`. Event loop's thread only."""

    def __init__(self, *, metrics: LeaseMetrics) -> None:
        self._metrics = metrics
        self._prompts: Live[_Prompt] = Live("prefill")
        self._leases = LeaseTable()
        self._budgets: dict[str, Budget] = {}
        self._boots: dict[str, str] = {}
        self._load = Load()
        self._pace = Pace()
        self._followers = QueueFollowers()
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, engine: Engine, exchange: Exchange | None) -> None:
        """Called once, before the first request."""
        self._engine = engine
        self._exchange = exchange
        self._block_size = engine.runner.layout.block_size
        self._max_pinned = max(1, int(engine.runner.num_blocks * PINNED_SHARE))

    def begin(self, request: PrefillRequest, stream: Stream) -> None:
        """Takes a prompt; raises `Refused` for an id that is known already."""
        prompt = _Prompt(request, stream, time.monotonic())
        self._prompts.add(request.id, prompt)
        stream.on_cancel(lambda: self._cancel(request.id))
        budget = self._budgets.setdefault(stream.peer, Budget(self._max_pinned))
        budget.take(request.id, -(-prompt.num_tokens // self._block_size), lambda: self._submit(prompt))

    def state(self, id: str) -> PrefillProgress | PrefillDone:
        """Where a prompt stands; raises `Refused` for one that is not here any more."""
        prompt = self._prompts.get(id)
        if prompt is None:
            raise Refused(
                f"prefill {id} is not known here; it was released, or its lease ended", code="unknown_prefill"
            )
        return prompt.said or PrefillProgress(b"", 0, 0, 0, time.monotonic() * 1e3)

    def renew(self, id: str, lease_s: float) -> LeaseState:
        """Prolongs a lease; one that has yet to begin is held as well."""
        prompt = self._prompts.get(id)
        is_held = prompt is not None and (
            prompt.said is None or self._leases.renew(id, lease_s=lease_s, now=time.monotonic())
        )
        self._schedule()
        return LeaseState(id, is_held)

    def release(self, id: str) -> LeaseState:
        """Ends a prompt, whatever its state. Idempotent."""
        return LeaseState(id, self._drop(id))

    def shake_hands(self, theirs: KVHandshake, peer: str) -> KVHandshake:
        """A decode worker tells who it is; answers in kind, or raises `Refused` if no KV can travel between the two."""
        assert self._exchange is not None
        check_handshake(theirs, self._exchange.handshake)
        self.greet(peer, theirs.boot)
        return self._exchange.handshake

    def greet(self, peer: str, boot: str) -> None:
        """A decode worker will read here: if it is a new start of a known one, the old one's leases end."""
        if self._boots.get(peer, boot) != boot:
            for id in self._leases.of_peer(peer):
                self._drop(id)
        self._boots[peer] = boot
        if self._exchange is not None:
            self._exchange.drivers.watch_for(SELF_TEST_S)

    async def drain(self) -> None:
        """Returns when no prompt is left."""
        await self._prompts.drained()

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def on_output(self, output: Output) -> None:
        """The engine tells of a chunk or of an end."""
        prompt = self._prompts.get(output.id)
        if prompt is None:
            return
        if isinstance(output, ChunkComputed):
            self._announce(prompt, output)
        elif isinstance(output, Ended):
            self._unpin(self._prompts.fail(output))

    def on_report(self, report: StepReport) -> None:
        """The engine tells how busy it is, which decode workers want to know."""
        self._load = report.load
        self._pace.note(report.stats)
        self._followers.tell(self._queue())

    def follow_queue(self, stream: Stream) -> None:
        """A decode worker wants to know how long the queue is."""
        self._followers.add(stream, self._queue())

    def dress(self, id: str, chunk: TokenChunk) -> TokenChunk:
        """Nothing to add: this worker has no token streams."""
        return chunk

    def _queue(self) -> PrefillQueue:
        held_back = sum(prompt.num_tokens for prompt in self._prompts if not prompt.is_submitted)
        return PrefillQueue(self._load.prefill_tokens + held_back, self._pace.tokens_per_s)

    def _submit(self, prompt: _Prompt) -> None:
        prompt.is_submitted = True
        self._engine.submit(EngineRequest.of(prompt.request, mode="prefill"))

    def _announce(self, prompt: _Prompt, chunk: ChunkComputed) -> None:
        request, now = prompt.request, time.monotonic()
        first = request.skip_tokens // self._block_size
        progress = PrefillProgress(
            block_ids=pack_ids(chunk.block_ids[first:]),
            first_token=first * self._block_size,
            num_tokens=chunk.num_tokens,
            cached_tokens=chunk.cached_tokens,
            at_ms=now * 1e3,
        )
        self._leases.grant(request.id, prompt.stream.peer, lease_s=request.lease_ms / 1e3, now=now)
        self._schedule()
        if chunk.token is None:
            prompt.said = progress
            prompt.stream.send(progress)
            return
        prefill_ms = (now - prompt.arrived_s) * 1e3 - chunk.queue_ms
        done = PrefillDone(progress, chunk.token, chunk.logprobs, chunk.queue_ms, prefill_ms)
        prompt.said = done
        prompt.stream.end(done)

    def _cancel(self, id: str) -> None:
        """The caller hung up, or died, before the end of the stream."""
        prompt = self._prompts.get(id)
        if prompt is None:
            return
        if prompt.said is None:
            self._drop(id)
            return
        self._leases.shorten(id, to_s=time.monotonic() + CANCEL_GRACE_S)
        self._schedule()

    def _drop(self, id: str) -> bool:
        """Frees a prompt's blocks, or stops its computation; False if it is not here."""
        prompt = self._prompts.get(id)
        if prompt is None:
            return False
        if isinstance(prompt.said, PrefillDone):
            self._engine.release(id)
        elif prompt.is_submitted:
            self._engine.abort(id)
        self._unpin(self._prompts.remove(id))
        return True

    def _unpin(self, prompt: _Prompt) -> None:
        """What a prompt that is gone had of leases and room is for others."""
        self._leases.end(prompt.request.id)
        budget = self._budgets[prompt.stream.peer]
        budget.give(prompt.request.id)
        if budget.is_idle:
            del self._budgets[prompt.stream.peer]
        self._schedule()

    def _schedule(self) -> None:
        """Sets the timer for the first lease that ends; lets the driver work while peers may be reading."""
        self._metrics.pinned(len(self._leases))
        if self._exchange is not None:
            self._exchange.drivers.watch(len(self._leases) > 0)
        if self._timer is not None:
            self._timer.cancel()
        next_s = self._leases.next_expiry_s
        loop = asyncio.get_running_loop()
        self._timer = None if next_s is None else loop.call_later(max(0.0, next_s - time.monotonic()), self._expire)

    def _expire(self) -> None:
        for id in self._leases.expired(time.monotonic()):
            logger.warning("the lease of prefill %s ended without a release", id)
            self._metrics.expired()
            self._prompts[id].stream.fail(Refused(f"the lease of prefill {id} has ended", code="lease_expired"))
            self._drop(id)
        self._schedule()
