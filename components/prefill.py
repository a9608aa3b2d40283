"""The prefill worker: computes prompts for decode workers.

Life of a prompt here:

    queued      waits until the asking decode worker has few enough blocks pinned here
    computing   in the engine; after each chunk its ready blocks are announced, cumulatively
    leased      from the first announcement on its blocks are pinned: until decode releases them,
                or does not renew in time
    held        all computed, the first token told; only the lease is left
    gone        released, expired, failed, or cancelled; decode asking again is told so

A cancelled stream ends a prompt at once if nothing was announced. Otherwise the release that decode
sends on every exit ends it, or a short rest of the lease: reads may be in flight, and a block that
is read must not change before the lease is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from components import rules
from components.disaggregation import Pace
from components.engine.outputs import ChunkComputed, Ended, EngineRequest, Output, StepReport
from components.messages import (
    PREFILL_REPLIES,
    PREFILL_REQUESTS,
    FollowPrefillQueue,
    KVHandshake,
    LeaseRelease,
    LeaseRenew,
    LeaseState,
    Load,
    PrefillDone,
    PrefillPoll,
    PrefillProgress,
    PrefillQueue,
    PrefillRequest,
    TokenChunk,
    WorkerEvents,
    WorkerSnapshot,
    pack_ids,
    unpack_ids,
)
from components.options import DisaggOptions
from components.transfer.budget import Budget
from components.transfer.lease import LeaseTable
from graph import Component, Context, GraphView, NodeView, Publishes, Refused, Sends, Serves, Stream

if TYPE_CHECKING:
    from components.engine.engine import Engine
    from components.exchange import Exchange
    from components.serving import Serving
    from components.transfer.agent import LocalRegion, TransferAgent
    from components.transfer.metrics import LeaseMetrics

CANCEL_GRACE_S = 1.0
"""How long announced blocks outlive a cancelled stream whose release does not come."""

SELF_TEST_S = 5.0
"""How long after a handshake the peer's self-test may need our progress."""

PINNED_SHARE = 0.75
"""Part of the pool that one decode worker may have pinned here."""

logger = logging.getLogger(__name__)


class PrefillWorker(Component):
    """Computes prompts in chunks and pins their blocks until decode has pulled them."""

    Options = DisaggOptions
    compute = True
    requests = Serves(PREFILL_REQUESTS, PREFILL_REPLIES, required=True)
    kv = Sends("kv-blocks", required=True)
    events = Publishes(WorkerEvents, WorkerSnapshot)

    _serving: Serving | None = None
    _exchange: Exchange | None = None
    _prompts: Prompts | None = None

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """The block size fits the hash unit."""
        return (*rules.hash_unit_faults(node), *rules.rank_faults(node))

    @classmethod
    def warnings(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """A missing transfer backend."""
        return rules.transceiver_warnings(node)

    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        """The hash unit that is the same all over the graph."""
        return rules.resolve_hash_unit(node, graph)

    @classmethod
    def patience_s(cls, node: NodeView) -> float:
        """Longer than its longest step."""
        return float(node.options["hang_timeout_s"])

    async def start(self, context: Context) -> None:
        """Loads the model and registers its KV pool with the transfer back end."""
        from components.exchange import open_exchange
        from components.serving import Serving
        from components.transfer.metrics import LeaseMetrics

        self._prompts = Prompts(metrics=LeaseMetrics(context.metrics))
        self._serving = Serving(
            self.options, context, role="prefill", events=PrefillWorker.events, watcher=self._prompts
        )
        await self._serving.start()
        self._exchange = await open_exchange(self.options, context, self._serving, self.make_agent)
        self._prompts.attach(self._serving.engine, self._exchange)
        context.serve(PrefillWorker.requests, self._handle)

    def make_agent(self, region: LocalRegion) -> TransferAgent:
        """The agent over this worker's pool; called on the thread that will drive it."""
        from components.exchange import make_agent

        return make_agent(self.options, region)

    async def drain(self) -> None:
        """Returns when no prompt is computed or pinned any more."""
        if self._prompts is not None:
            await self._prompts.drain()

    async def stop(self) -> None:
        """Frees the agent and the engine."""
        if self._prompts is not None:
            self._prompts.close()
        if self._exchange is not None:
            await self._exchange.drivers.close()
        if self._serving is not None:
            await self._serving.stop()

    async def alive(self) -> None:
        """Returns when the engine has computed a token and the transfer thread has made a turn."""
        if self._serving is not None:
            await self._serving.alive()
        if self._exchange is not None:
            await self._exchange.drivers.alive()

    def _handle(self, request: Any, stream: Stream) -> None:
        assert self._prompts is not None
        if self._exchange is None:
            raise Refused(rules.DISABLED, code=rules.DISABLED_CODE)
        match request:
            case PrefillRequest():
                self._prompts.begin(request, stream)
            case PrefillPoll():
                stream.end(self._prompts.state(request.id))
            case FollowPrefillQueue():
                self._prompts.follow_queue(stream)
            case LeaseRenew():
                stream.end(self._prompts.renew(request.id, request.lease_ms / 1e3))
            case LeaseRelease():
                stream.end(self._prompts.release(request.id))
            case KVHandshake():
                self._shake_hands(request, self._exchange.handshake, stream)

    def _shake_hands(self, theirs: KVHandshake, own: KVHandshake, stream: Stream) -> None:
        from components.transfer.peers import check_handshake

        check_handshake(theirs, own)
        assert self._prompts is not None
        self._prompts.greet(stream.peer, theirs.boot)
        stream.end(own)


class _Prompt(msgspec.Struct):
    """One prompt on its way."""

    request: PrefillRequest
    stream: Stream
    arrived_s: float
    is_submitted: bool = False
    said: PrefillProgress | PrefillDone | None = None


class Prompts:
    """All prompts of one prefill worker and their leases; the engine's `Watcher`. Event loop's thread only."""

    def __init__(self, *, metrics: LeaseMetrics) -> None:
        self._metrics = metrics
        self._prompts: dict[str, _Prompt] = {}
        self._leases = LeaseTable()
        self._budgets: dict[str, Budget] = {}
        self._boots: dict[str, str] = {}
        self._load = Load()
        self._pace = Pace()
        self._followers: dict[str, Stream] = {}
        self._told = PrefillQueue(0, 0.0)
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def attach(self, engine: Engine, exchange: Exchange | None) -> None:
        """Called once, before the first request."""
        self._engine = engine
        self._exchange = exchange
        self._block_size = engine.runner.layout.block_size
        self._max_pinned = max(1, int(engine.runner.num_blocks * PINNED_SHARE))

    def begin(self, request: PrefillRequest, stream: Stream) -> None:
        """Takes a prompt; raises `Refused` for an id that is known already."""
        if request.id in self._prompts:
            raise Refused(f"prefill {request.id} is already under way here", code="duplicate_request")
        prompt = _Prompt(request, stream, time.monotonic())
        self._prompts[request.id] = prompt
        self._idle.clear()
        stream.on_cancel(lambda: self._cancel(request.id))
        num_tokens = len(request.tokens) // 4
        budget = self._budgets.setdefault(stream.peer, Budget(self._max_pinned))
        budget.take(request.id, -(-num_tokens // self._block_size), lambda: self._submit(prompt))

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

    def greet(self, peer: str, boot: str) -> None:
        """A decode worker shakes hands: if it is a new start of a known one, the old one's leases end."""
        if self._boots.get(peer, boot) != boot:
            for id in self._leases.of_peer(peer):
                self._drop(id)
        self._boots[peer] = boot
        if self._exchange is not None:
            self._exchange.drivers.watch_for(SELF_TEST_S)

    async def drain(self) -> None:
        """Returns when no prompt is left."""
        await self._idle.wait()

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
            prompt.stream.fail(output.error)
            self._forget(output.id)

    def on_report(self, report: StepReport) -> None:
        """The engine tells how busy it is, which decode workers want to know."""
        self._load = report.load
        self._pace.note(report.stats)
        self._tell_queue()

    def follow_queue(self, stream: Stream) -> None:
        """A decode worker wants to know how long the queue is."""
        self._followers[stream.id] = stream
        stream.on_cancel(lambda: self._unfollow(stream.id))
        stream.send(self._queue())

    def _unfollow(self, stream: str) -> None:
        self._followers.pop(stream, None)

    def _queue(self) -> PrefillQueue:
        held_back = sum(len(p.request.tokens) // 4 for p in self._prompts.values() if not p.is_submitted)
        return PrefillQueue(self._load.prefill_tokens + held_back, self._pace.tokens_per_s)

    def _tell_queue(self) -> None:
        queue = self._queue()
        if queue == self._told:
            return
        self._told = queue
        for stream in self._followers.values():
            stream.send(queue)

    def dress(self, id: str, chunk: TokenChunk) -> TokenChunk:
        """Nothing to add: this worker has no token streams."""
        return chunk

    def _submit(self, prompt: _Prompt) -> None:
        request = prompt.request
        prompt.is_submitted = True
        self._engine.submit(
            EngineRequest(
                id=request.id,
                tokens=unpack_ids(request.tokens),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                stopping=request.stopping,
                mode="prefill",
                cache_salt=request.cache_salt,
                priority=request.priority,
            )
        )

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
        self._forget(id)
        return True

    def _forget(self, id: str) -> None:
        prompt = self._prompts.pop(id)
        self._leases.end(id)
        budget = self._budgets[prompt.stream.peer]
        budget.give(id)
        if budget.is_idle:
            del self._budgets[prompt.stream.peer]
        self._schedule()
        if not self._prompts:
            self._idle.set()

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
