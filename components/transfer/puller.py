"""The puller: carries out what each `Pull` decides, between the engine, the prefill worker and the driver.

All of it lives on the event loop. A pull's id is the engine's sequence id; towards prefill every
attempt has an id of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from components.messages import PrefillDone, PrefillProgress, PrefillRequest, TokenLogprobs
from components.transfer import actions
from components.transfer.actions import Action
from components.transfer.budget import Budget
from components.transfer.caller import PrefillCaller
from components.transfer.group import DriverGroup, RankPart
from components.transfer.metrics import TransferMetrics
from components.transfer.peers import LinkedPrefill
from components.transfer.plan import Side, plan, whole_blocks
from components.transfer.pull import TIMED_OUT, Prompt, Pull, PullRules
from components.transfer.reads import ReadResult
from graph import Call, Client, LinkError

logger = logging.getLogger(__name__)


class PullEngine(Protocol):
    """What the puller needs of the engine; see `components.engine.engine.Engine`."""

    def reserve(self, id: str) -> None: ...
    def compute_locally(self, id: str) -> None: ...
    def adopt(self, id: str, *, token: int, logprobs: TokenLogprobs | None) -> None: ...
    def settled(self, ids: Sequence[str]) -> None: ...
    def hold(self, id: str) -> None: ...
    def resume(self, id: str) -> None: ...


class PullOwner(Protocol):
    """Who started the pull and is told how it ended."""

    def on_local(self, id: str, reason: str) -> None:
        """The engine recomputes the prompt."""

    def on_adopted(self, id: str, record: PullRecord) -> None:
        """The engine goes on after the first token, whose KV and predecessors' are here."""

    def on_finished(self, id: str, record: PullRecord, finish: actions.Finish) -> None:
        """The first token ended the sequence; the engine's sequence is to be dropped."""


class PullRecord(msgspec.Struct):
    """What one pull did, for the timing and the metrics."""

    peer: str
    cached_tokens: int = 0  # on the prefill side
    blocks: int = 0
    num_bytes: int = 0
    descriptors: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    wait_ms: float = 0.0
    post_ms: float = 0.0
    wire_ms: float = 0.0
    timeline: list[tuple[str, float]] = msgspec.field(default_factory=list)


class _Active(msgspec.Struct):
    """One pull and what belongs to it."""

    id: str
    request: PrefillRequest
    peer: LinkedPrefill
    pull: Pull
    record: PullRecord
    target: Side | None = None
    call: Call | None = None
    timer: asyncio.TimerHandle | None = None


class Puller:
    """All remote prefills of one decode worker."""

    def __init__(
        self,
        *,
        engine: PullEngine,
        client: Client,
        drivers: DriverGroup,
        owner: PullOwner,
        rules: PullRules,
        budget: Budget,
        metrics: TransferMetrics,
    ) -> None:
        self._engine = engine
        self._caller = PrefillCaller(client, answer_s=rules.lease_s)
        self._drivers = drivers
        self._owner = owner
        self._rules = rules
        self._budget = budget
        self._metrics = metrics
        self._active: dict[str, _Active] = {}
        self._tick_s = min(rules.lease_s / 6, rules.silence_s / 2, rules.timeout_s / 4)

    @property
    def num_active(self) -> int:
        """Pulls that are not over, or whose READ is still in flight."""
        return len(self._active)

    def tokens_asked(self, peer: str) -> int:
        """Prompt tokens that a prefill worker was or will be asked for and has not computed yet."""
        asked = (a.pull for a in self._active.values() if a.peer.id == peer)
        return sum(pull.num_uncomputed for pull in asked if not pull.is_over)

    def begin(self, id: str, request: PrefillRequest, prompt: Prompt, peer: LinkedPrefill) -> None:
        """Starts a remote prefill for the engine's sequence `id`, which is in the state "matched"."""
        active = _Active(id, request, peer, Pull(prompt, self._rules), PullRecord(peer.id))
        self._active[id] = active
        self._tick(active)
        missing = prompt.num_tokens - prompt.cached_tokens
        self._budget.take(id, missing, lambda: self._do(active, active.pull.granted(time.monotonic())))

    def reserved(self, id: str, block_ids: Sequence[int], first_token: int) -> None:
        """The engine lent blocks."""
        active = self._active.get(id)
        if active is not None:
            active.target = Side(block_ids, first_token)
            self._do(active, active.pull.reserved(time.monotonic()))

    def cancel(self, id: str) -> bool:
        """The sequence ended, by its client or in the engine. Idempotent; False if there is no pull for it."""
        active = self._active.get(id)
        if active is None:
            return False
        self._do(active, active.pull.cancelled())
        return True

    def peer_lost(self, peer: str) -> None:
        """A prefill worker died or left."""
        for active in [a for a in self._active.values() if a.peer.id == peer]:
            self._do(active, active.pull.prefill_failed(f"prefill worker {peer} was lost"))

    def close(self) -> None:
        """Ends all actions."""
        for id in list(self._active):
            self.cancel(id)

    def _do(self, active: _Active, decided: Sequence[Action]) -> None:
        for action in decided:
            self._act(active, action)
        if active.pull.is_quiet and self._active.get(active.id) is active:
            del self._active[active.id]
            if active.timer is not None:
                active.timer.cancel()
            self._budget.give(active.id)

    def _act(self, active: _Active, action: Action) -> None:
        match action:
            case actions.Ask():
                self._ask(active)
            case actions.Reserve():
                self._engine.reserve(active.id)
            case actions.Read():
                self._read(active, action)
            case actions.Renew():
                self._renew(active)
            case actions.Poll():
                self._poll(active)
            case actions.Adopt(token, logprobs):
                active.record.timeline.append(("adopted", time.monotonic() * 1e3))
                self._metrics.remote(active.pull.have - active.pull.prompt.cached_tokens)
                self._owner.on_adopted(active.id, active.record)
                self._engine.adopt(active.id, token=token, logprobs=logprobs)
            case actions.Finish():
                self._metrics.remote(0)
                self._owner.on_finished(active.id, active.record, action)
            case actions.Recompute(reason):
                logger.warning("request %s is prefilled here: %s", active.id, reason)
                if reason == TIMED_OUT:
                    self._metrics.timed_out()
                self._owner.on_local(active.id, reason)
                self._engine.compute_locally(active.id)
            case actions.Release():
                self._release(active)
            case actions.Settle():
                self._engine.settled([active.id])

    def _tick(self, active: _Active) -> None:
        active.timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick, active)
        self._do(active, active.pull.ticked(time.monotonic()))

    def _ask(self, active: _Active) -> None:
        def on_failure(error: LinkError) -> None:
            self._do(active, active.pull.prefill_failed(f"{active.peer.id}: {error}"))

        active.call = self._caller.ask(
            active.request, active.peer.id, on_item=lambda item: self._told(active, item), on_failure=on_failure
        )

    def _told(self, active: _Active, item: Any) -> None:
        """Prefill said where it stands, by itself or when asked."""
        now = time.monotonic()
        progress = item.progress if isinstance(item, PrefillDone) else item
        active.record.cached_tokens = progress.cached_tokens
        if progress.num_tokens and not active.pull.is_over:
            active.record.timeline.append(("chunk", progress.at_ms))
        if isinstance(item, PrefillDone):
            active.record.queue_ms, active.record.prefill_ms = item.queue_ms, item.prefill_ms
            self._do(active, active.pull.completed(item, now))
        elif isinstance(item, PrefillProgress):
            self._do(active, active.pull.progressed(item, now))

    def _read(self, active: _Active, action: actions.Read) -> None:
        try:
            parts = self._parts(active, action)
        except ValueError as error:  # what prefill announced cannot be true
            self._do(active, active.pull.read_failed(f"{active.peer.id}: {error}"))
            return
        active.record.timeline.append(("read", time.monotonic() * 1e3))
        if not self._rules.overlap:
            self._engine.hold(active.id)
        self._drivers.read(parts, lambda result: self._read_ended(active, action, result))

    def _parts(self, active: _Active, action: actions.Read) -> list[RankPart]:
        """The READ's pieces for each pair of ranks; raises `ValueError` for blocks that are not there."""
        target = active.target
        assert target is not None
        stranger = next((b for b in action.source_ids if not 0 <= b < active.peer.num_blocks), None)
        if stranger is not None:
            raise ValueError(f"block {stranger} was announced; there are {active.peer.num_blocks}")
        source = Side(action.source_ids, action.source_first)
        return [
            RankPart(to.rank, to.agent, plan(to.way, source, target, start=action.start, stop=stop))
            for to in active.peer.routes
            for stop in (whole_blocks(to.way, action.stop),)
        ]

    def _read_ended(self, active: _Active, action: actions.Read, result: ReadResult) -> None:
        self._resume(active)
        record, now = active.record, time.monotonic()
        is_failed = result.error is not None
        self._metrics.read(result)
        record.timeline.append(("read_failed" if is_failed else "read_done", now * 1e3))
        record.wait_ms += result.wait_ms
        record.post_ms += result.post_ms
        record.wire_ms += result.wire_ms
        if result.error is not None:
            self._do(active, active.pull.read_failed(f"KV transfer from {active.peer.id} failed: {result.error}"))
            return
        size = active.pull.prompt.block_size
        record.blocks += -(-action.stop // size) - action.start // size
        record.num_bytes += result.num_bytes
        record.descriptors += result.descriptors
        self._do(active, active.pull.read_done(action.stop, now))

    def _renew(self, active: _Active) -> None:
        sent_at = time.monotonic()

        def answered(held: bool | None) -> None:
            if held is False:
                self._metrics.lease_lost()
            self._do(active, active.pull.lease_answered(held, sent_at=sent_at, now=time.monotonic()))

        self._caller.renew(active.request, active.peer.id, answered)

    def _poll(self, active: _Active) -> None:
        def on_reply(reply: Any) -> None:
            active.pull.poll_answered()
            self._told(active, reply)

        def on_failure(error: LinkError) -> None:
            self._do(active, active.pull.poll_failed(f"{active.peer.id} does not say where it stands: {error}"))

        self._caller.poll(active.request.id, active.peer.id, on_reply=on_reply, on_failure=on_failure)

    def _resume(self, active: _Active) -> None:
        if not self._rules.overlap:
            self._engine.resume(active.id)

    def _release(self, active: _Active) -> None:
        self._resume(active)  # steps wait for a READ, not for one that was given up
        if active.call is None:
            return  # never asked
        self._caller.release(active.request.id, active.peer.id)
        active.call.cancel()
