"""The requests of a decode worker: where each prompt is computed, what came of its pull, and what is told of it.

`components.decode` tells their life.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from components import rules
from components.disaggregation import Choice, Pace, Queue, choose, short_prompt
from components.engine.outputs import Ended, Matched, Output, Reserved, StepReport, StepTokens
from components.exchange import Exchange
from components.messages import TOKEN_BYTES, GenerateRequest, Load, PrefillRequest, Timing, TokenChunk
from components.serving import Serving
from components.transfer.actions import Finish
from components.transfer.budget import Budget
from components.transfer.metrics import TransferMetrics
from components.transfer.peers import LinkedPrefill, PrefillPeers
from components.transfer.pull import Prompt, PullRules
from components.transfer.puller import Puller, PullRecord
from graph import Client, Context, LinkError, Refused, Stream

if TYPE_CHECKING:
    from components.decode import DecodeOptions


class _Walk(msgspec.Struct):
    """What is noted of one request for its first and its last chunk."""

    request: GenerateRequest
    reason: str = ""
    cached_tokens: int = 0  # found here
    record: PullRecord | None = None  # once its KV was pulled

    @property
    def num_tokens(self) -> int:
        return len(self.request.tokens) // TOKEN_BYTES

    @property
    def num_output_tokens(self) -> int:
        """Those that an earlier worker generated."""
        return self.num_tokens - self.request.num_prompt_tokens

    def dress(self, chunk: TokenChunk, block_size: int) -> TokenChunk:
        """A chunk of the engine's with what prefill had in its cache, and the story of the transfer."""
        if chunk.cached_tokens is not None and self.record is not None:
            chunk = replace(chunk, cached_tokens=max(chunk.cached_tokens, self.record.cached_tokens))
        return chunk if chunk.timing is None else replace(chunk, timing=self._timing(chunk.timing, block_size))

    def _timing(self, timing: Timing, block_size: int) -> Timing:
        """The engine's timing with the transfer's part of it."""
        timing = replace(timing, reason=self.reason, overlap_blocks=self.cached_tokens // block_size)
        record = self.record
        if record is None:
            return timing
        return replace(
            timing,
            prefill_worker=record.peer,
            mode="remote",
            cached_tokens=max(self.cached_tokens, record.cached_tokens),
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


class DecodeRequests:
    """All requests of one decode worker; the engine's `Watcher` and the puller's `PullOwner`."""

    def __init__(self, options: DecodeOptions) -> None:
        self._options = options
        self._max_local = options.max_local_prefill_length
        self._walks: dict[str, _Walk] = {}
        self._attempts = count(1)
        self._load = Load()
        self._pace = Pace()
        self._puller: Puller | None = None
        self._peers: PrefillPeers | None = None

    def attach(self, context: Context, serving: Serving) -> None:
        """Called once, before the first request."""
        self._serving = serving
        self._spawn = context.spawn
        self._metrics = TransferMetrics(context.metrics)
        self._boot = context.boot
        self._block_size = serving.engine.runner.layout.block_size

    def connect(self, context: Context, exchange: Exchange, client: Client) -> None:
        """Called once, after `attach`, where a back end is set; from now on the prefill workers are followed."""
        config = self._options.cache_transceiver_config
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

    def begin(self, request: GenerateRequest, stream: Stream) -> None:
        """Takes a request; raises `Refused` if it demands a remote prefill and no back end is set, here or there.

        While the first prefill worker is being linked, as in a graph that has just started, requests wait for it.
        """
        if self._peers is not None and self._peers.is_linking and _Walk(request).num_tokens > self._max_local:
            self._spawn(self._begin_linked(request, stream, self._peers), name=f"wait for a link {request.id}")
        else:
            self._take(request, stream)

    async def _begin_linked(self, request: GenerateRequest, stream: Stream, peers: PrefillPeers) -> None:
        await peers.settle()
        if stream.is_closed:
            return
        try:
            self._take(request, stream)
        except LinkError as error:
            stream.fail(error)

    def _take(self, request: GenerateRequest, stream: Stream) -> None:
        walk = _Walk(request)
        has_peer = self._peers is not None and self._peers.usable(request.prefill) is not None
        if not has_peer and request.prefill is not None and self._is_disabled(request.prefill):
            raise Refused(rules.DISABLED, code=rules.DISABLED_CODE)
        is_remote = has_peer and walk.num_tokens > self._max_local
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
        if walk is None:
            return
        if isinstance(output, Ended):
            del self._walks[output.id]
        if self._puller is None:
            return
        match output:
            case Matched():
                self._decide(walk, output.cached_tokens)
            case Reserved():
                self._puller.reserved(output.id, output.block_ids, output.first_token)
            case Ended():
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
        return walk.dress(chunk, self._block_size)

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

    def _decide(self, walk: _Walk, cached_tokens: int) -> None:
        """Remote or local, now that it is known what is cached here."""
        assert self._peers is not None
        assert self._puller is not None
        request = walk.request
        walk.cached_tokens = cached_tokens
        peer = self._peers.usable(request.prefill)
        choice = self._choose(walk.num_tokens - cached_tokens, peer) if peer is not None else None
        if peer is None or choice is None or not choice.is_remote:
            self._note_local(walk, choice)
            self._serving.engine.compute_locally(request.id)
            return
        walk.reason = choice.reason
        self._puller.begin(request.id, self._prefill_request(walk), self._prompt(walk), peer)

    def _choose(self, uncached_tokens: int, peer: LinkedPrefill) -> Choice:
        assert self._peers is not None
        assert self._puller is not None
        told = self._peers.queue(peer.id) if self._options.watch_prefill_queue else None
        there = None
        if told is not None:  # what was just asked may not be in what the peer told
            there = Queue(max(told.tokens, self._puller.tokens_asked(peer.id)), told.tokens_per_s)
        here = Queue(self._load.prefill_tokens, self._pace.tokens_per_s)
        return choose(uncached_tokens, max_local=self._max_local, here=here, there=there)

    def _is_disabled(self, prefill: str) -> bool:
        """Whether KV transfer is switched off on this worker, or on that prefill worker."""
        if self._peers is None:
            return True
        refusal = self._peers.refusal(prefill)
        return isinstance(refusal, LinkError) and refusal.code == rules.DISABLED_CODE

    def _note_local(self, walk: _Walk, choice: Choice | None = None) -> None:
        """Books why a prompt is prefilled here."""
        choice = choice or short_prompt(self._max_local)
        word, reason = choice.word, choice.reason
        if self._peers is None:
            word, reason = "disabled", "no transfer backend is set"
        elif self._peers.usable(walk.request.prefill) is None:
            refusal = self._peers.refusal(walk.request.prefill)
            word, reason = ("refused", str(refusal)) if refusal else ("no_prefill_worker", "no prefill worker is alive")
        walk.reason = reason
        self._metrics.local(word)

    def _prompt(self, walk: _Walk) -> Prompt:
        stopping = walk.request.stopping
        return Prompt(
            num_tokens=walk.num_tokens,
            cached_tokens=walk.cached_tokens,
            block_size=self._block_size,
            max_new_tokens=stopping.max_tokens - walk.num_output_tokens,
            stop_token_ids=stopping.stop_token_ids,
        )

    def _prefill_request(self, walk: _Walk) -> PrefillRequest:
        request = walk.request
        return PrefillRequest(
            id=f"{self._boot}-{next(self._attempts)}",
            tokens=request.tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            skip_tokens=walk.cached_tokens,
            sampling=request.sampling,
            stopping=request.stopping,
            lease_ms=self._options.cache_transceiver_config.kv_lease_ms,
            disagg_request_id=request.disagg_request_id,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
