"""The decode worker: pulls prompts' KV blocks and generates.

Life of a request here:

    taken       handed to the engine, which matches its prefix cache
    decided     few uncached tokens, or no prefill worker that can be used: local, the engine goes on
    pulling     asked of a prefill worker, pulled chunk by chunk (see `components.transfer.pull`)
    generating  in the engine's batch: all KV is here, computed or pulled
    ended       in its last chunk, or an error; a pull that is still open is cancelled
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec.structs import replace

from components import rules
from components.disaggregation import Choice, Pace, Queue, choose, short_prompt
from components.engine.outputs import Ended, Matched, Output, Reserved, StepReport, StepTokens
from components.messages import (
    PREFILL_REPLIES,
    PREFILL_REQUESTS,
    GenerateRequest,
    Load,
    PrefillRequest,
    Timing,
    TokenChunk,
    WorkerEvents,
    WorkerSnapshot,
)
from components.options import DisaggOptions
from graph import (
    Calls,
    Component,
    Context,
    GraphView,
    LinkError,
    NodeView,
    Publishes,
    Receives,
    Refused,
    Serves,
    Stream,
    option,
)

if TYPE_CHECKING:
    from components.exchange import Exchange
    from components.serving import Serving
    from components.transfer.agent import LocalRegion, TransferAgent
    from components.transfer.peers import LinkedPrefill, PrefillPeers
    from components.transfer.pull import Finish, Prompt
    from components.transfer.puller import Puller, PullRecord

TOKEN_BYTES = 4


class DecodeOptions(DisaggOptions, frozen=True, kw_only=True):
    """Options of the decode worker."""

    max_local_prefill_length: Annotated[int, option("uncached prompt tokens up to which it prefills itself")] = 16
    watch_prefill_queue: Annotated[
        bool, option("prefills itself while the wait for prefill is longer than the work")
    ] = True


class DecodeWorker(Component):
    """Takes requests first, asks prefill for what is missing, pulls it, generates."""

    Options = DecodeOptions
    compute = True
    requests = Serves(GenerateRequest, TokenChunk, required=True)
    prefill = Calls(PREFILL_REQUESTS, PREFILL_REPLIES, required=False)
    kv = Receives("kv-blocks")
    events = Publishes(WorkerEvents, WorkerSnapshot)

    _serving: Serving | None = None
    _exchange: Exchange | None = None
    _requests: Requests | None = None

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """The block size fits the hash unit, and every prefill worker can be pulled from."""
        return (*rules.hash_unit_faults(node), *rules.rank_faults(node), *rules.pull_faults(node, graph))

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
        """Loads the model, registers its KV pool, and starts to follow the prefill workers."""
        from components.exchange import open_exchange
        from components.serving import Serving

        self._requests = Requests(self.options)
        self._serving = Serving(
            self.options, context, role="decode", events=DecodeWorker.events, watcher=self._requests
        )
        await self._serving.start()
        self._exchange = await open_exchange(self.options, context, self._serving, self.make_agent)
        self._requests.attach(context, self._serving, self._exchange)
        context.serve(DecodeWorker.requests, self._requests.begin)

    def make_agent(self, region: LocalRegion) -> TransferAgent:
        """The agent over this worker's pool; called on the thread that will drive it."""
        from components.exchange import make_agent

        return make_agent(self.options, region)

    async def drain(self) -> None:
        """Returns when the running requests are done."""
        if self._serving is not None:
            await self._serving.drain()

    async def stop(self) -> None:
        """Releases what prefill holds for this worker, then frees the agent and the engine."""
        if self._requests is not None:
            self._requests.close()
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


class _Walk(msgspec.Struct):
    """What is noted of one request for its first and its last chunk."""

    request: GenerateRequest
    reason: str = ""
    cached_tokens: int = 0  # found here
    record: PullRecord | None = None  # once its KV was pulled


class Requests:
    """All requests of one decode worker; the engine's `Watcher` and the puller's `PullOwner`."""

    def __init__(self, options: DecodeOptions) -> None:
        self._options = options
        self._walks: dict[str, _Walk] = {}
        self._attempts = count(1)
        self._load = Load()
        self._pace = Pace()
        self._puller: Puller | None = None
        self._peers: PrefillPeers | None = None

    def attach(self, context: Context, serving: Serving, exchange: Exchange | None) -> None:
        """Called once, before the first request; from now on prefill workers are followed."""
        from components.transfer.metrics import TransferMetrics

        self._serving = serving
        self._metrics = TransferMetrics(context.metrics)
        self._boot = context.boot
        self._block_size = serving.engine.runner.layout.block_size
        if exchange is not None:
            self._connect(context, exchange)

    def begin(self, request: GenerateRequest, stream: Stream) -> None:
        """Takes a request; raises `Refused` if it demands a remote prefill and no back end is set, here or there."""
        walk = _Walk(request)
        has_peer = self._peers is not None and self._peers.usable(request.prefill) is not None
        if not has_peer and request.prefill is not None and self._is_disabled(request.prefill):
            raise Refused(rules.DISABLED, code=rules.DISABLED_CODE)
        is_remote = has_peer and len(request.tokens) // TOKEN_BYTES > self._options.max_local_prefill_length
        self._serving.generate(request, stream, mode="remote" if is_remote else "generate")
        self._walks[request.id] = walk
        if not is_remote:
            self._note_local(walk)

    def close(self) -> None:
        """Ends all pulls."""
        if self._puller is not None:
            self._puller.close()

    def on_output(self, output: Output) -> None:
        """The engine tells of a sequence: what concerns a remote prefill goes to the puller."""
        walk = self._walks.get(output.id)
        if walk is None or self._puller is None:
            return
        match output:
            case Matched():
                self._decide(walk, output.cached_tokens)
            case Reserved():
                self._puller.reserved(output.id, output.block_ids, output.first_token)
            case Ended():
                del self._walks[output.id]
                if not self._puller.cancel(output.id):
                    self._serving.engine.settled([output.id])  # ended between the last READ and its adoption

    def on_report(self, report: StepReport) -> None:
        """The engine tells how busy it is, and how fast it computes."""
        self._load = report.load
        self._pace.note(report.stats)

    def dress(self, id: str, chunk: TokenChunk) -> TokenChunk:
        """Adds what prefill had in its cache, and the story of the transfer."""
        walk = self._walks.get(id)
        if walk is None:
            return chunk
        if chunk.finish is not None:
            del self._walks[id]
        if chunk.cached_tokens is not None and walk.record is not None:
            chunk = replace(chunk, cached_tokens=max(chunk.cached_tokens, walk.record.cached_tokens))
        return chunk if chunk.timing is None else replace(chunk, timing=self._timing(walk, chunk.timing))

    def on_local(self, id: str, reason: str) -> None:
        """A pull was given up: its prompt is recomputed here."""
        self._metrics.local("fallback")
        if id in self._walks:
            self._walks[id].reason = reason

    def on_adopted(self, id: str, record: PullRecord) -> None:
        """A pull is complete."""
        if id in self._walks:
            self._walks[id].record = record

    def on_finished(self, id: str, record: PullRecord, finish: Finish) -> None:
        """The first token was the last: nothing had to be pulled."""
        walk = self._walks.get(id)
        if walk is None:
            return
        walk.record = record
        logprobs = None if finish.logprobs is None else (finish.logprobs,)
        self._serving.finish(StepTokens(id, (finish.token,), logprobs, finish.reason, walk.cached_tokens))

    def _connect(self, context: Context, exchange: Exchange) -> None:
        from components.transfer.budget import Budget
        from components.transfer.peers import PrefillPeers
        from components.transfer.pull import PullRules
        from components.transfer.puller import Puller

        config, client = self._options.cache_transceiver_config, context.client(DecodeWorker.prefill)
        puller = Puller(
            engine=self._serving.engine,
            client=client,
            drivers=exchange.drivers,
            owner=self,
            rules=PullRules(
                lease_s=config.kv_lease_ms / 1e3,
                timeout_s=config.kv_transfer_timeout_ms / 1e3,
                overlap=not self._options.disable_kv_cache_transfer_overlap,
            ),
            budget=Budget(config.max_tokens_in_buffer or self._serving.engine.max_length),
            metrics=self._metrics,
        )
        self._puller = puller
        self._peers = PrefillPeers(
            client,
            exchange.drivers,
            exchange.handshake,
            metrics=self._metrics,
            spawn=context.spawn,
            on_lost=puller.peer_lost,
            on_notice=context.notice,
        )
        self._peers.follow()

    def _decide(self, walk: _Walk, cached_tokens: int) -> None:
        """Remote or local, now that it is known what is cached here."""
        assert self._peers is not None
        assert self._puller is not None
        request = walk.request
        walk.cached_tokens = cached_tokens
        num_tokens = len(request.tokens) // TOKEN_BYTES
        peer = self._peers.usable(request.prefill)
        choice = self._choose(num_tokens - cached_tokens, peer) if peer is not None else None
        if peer is None or choice is None or not choice.is_remote:
            self._note_local(walk, choice)
            self._serving.engine.compute_locally(request.id)
            return
        walk.reason = choice.reason
        prompt = self._prompt(request, num_tokens, cached_tokens)
        self._puller.begin(request.id, self._prefill_request(request, cached_tokens), prompt, peer)

    def _choose(self, uncached_tokens: int, peer: LinkedPrefill) -> Choice:
        assert self._peers is not None
        assert self._puller is not None
        told = self._peers.queue(peer.id) if self._options.watch_prefill_queue else None
        there = None
        if told is not None:  # what was just asked may not be in what the peer told
            there = Queue(max(told.tokens, self._puller.tokens_asked(peer.id)), told.tokens_per_s)
        here = Queue(self._load.prefill_tokens, self._pace.tokens_per_s)
        return choose(uncached_tokens, max_local=self._options.max_local_prefill_length, here=here, there=there)

    def _is_disabled(self, prefill: str) -> bool:
        """Whether KV transfer is switched off on this worker, or on that prefill worker."""
        if self._peers is None:
            return True
        refusal = self._peers.refusal(prefill)
        return isinstance(refusal, LinkError) and refusal.code == rules.DISABLED_CODE

    def _note_local(self, walk: _Walk, choice: Choice | None = None) -> None:
        """Books why a prompt is prefilled here."""
        choice = choice or short_prompt(self._options.max_local_prefill_length)
        word, reason = choice.word, choice.reason
        if self._peers is None:
            word, reason = "disabled", "no transfer backend is set"
        elif self._peers.usable(walk.request.prefill) is None:
            refusal = self._peers.refusal(walk.request.prefill)
            word, reason = ("refused", str(refusal)) if refusal else ("no_prefill_worker", "no prefill worker is alive")
        walk.reason = reason
        self._metrics.local(word)

    def _prompt(self, request: GenerateRequest, num_tokens: int, cached_tokens: int) -> Prompt:
        from components.transfer.pull import Prompt

        num_output = num_tokens - request.num_prompt_tokens
        return Prompt(
            num_tokens=num_tokens,
            cached_tokens=cached_tokens,
            block_size=self._block_size,
            max_new_tokens=request.stopping.max_tokens - num_output,
            stop_token_ids=request.stopping.stop_token_ids,
        )

    def _prefill_request(self, request: GenerateRequest, cached_tokens: int) -> PrefillRequest:
        return PrefillRequest(
            id=f"{self._boot}-{next(self._attempts)}",
            tokens=request.tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            skip_tokens=cached_tokens,
            sampling=request.sampling,
            stopping=request.stopping,
            lease_ms=self._options.cache_transceiver_config.kv_lease_ms,
            disagg_request_id=request.disagg_request_id,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )

    def _timing(self, walk: _Walk, timing: Timing) -> Timing:
        """The engine's timing with the transfer's part of it."""
        timing = replace(timing, reason=walk.reason, overlap_blocks=walk.cached_tokens // self._block_size)
        record = walk.record
        if record is None:
            return timing
        return replace(
            timing,
            prefill_worker=record.peer,
            mode="remote",
            cached_tokens=max(walk.cached_tokens, record.cached_tokens),
            blocks_moved=record.blocks,
            bytes_moved=record.num_bytes,
            descriptors=record.descriptors,
            queue_ms=timing.queue_ms + record.queue_ms,
            prefill_ms=record.prefill_ms,
            transfer_wait_ms=record.wait_ms,
            transfer_post_ms=record.post_ms,
            transfer_wire_ms=record.wire_ms,
            timeline=tuple(record.timeline),
        )
