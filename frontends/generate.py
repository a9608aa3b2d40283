"""The flow of a request between processor, router and workers.

Life of a choice here:

    placing      the router (or least-busy) names the workers
    generating   the worker's tokens come in and go to the sink, step by step
    replacing    the worker was lost, was full or went silent: prompt and tokens so far go to another one,
                 which continues where the first one ended; at most `MAX_ATTEMPTS` in a row that brought
                 fewer than `PROGRESS_TOKENS` each
    finished     a finish reason, or the `LinkError` of the last attempt

Leaving `generate` in any way ends all streams of the request, at the workers and at the router.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from components.messages import Explanation, GenerateRequest, Placement, PlacementRequest, TokenChunk, pack_ids
from frontends.choice import Choice, Delta
from frontends.faults import may_retry
from frontends.placement import Placer
from graph import Client, LinkError, NoPeer, Overloaded, Peer, PeerFault, PeerLost, RequestCancelled

MAX_ATTEMPTS = 3
PROGRESS_TOKENS = 8
FIRST_WAIT_S = 1.0
"""How long a fresh request waits for a worker to turn up before it is refused."""

RESUME_WAIT_S = 30.0
"""The same for a choice whose worker was lost: its client sees a pause, as while a worker restarts."""

TOKEN_TIMEOUT_S = 600.0
"""Longest silence of a worker: a request may wait in its queue for minutes."""


class Sink(Protocol):
    """Takes what is generated; a stream of events and a whole reply are the two."""

    def add(self, choice: Choice, delta: Delta) -> None:
        """New text of a choice; `choice.finish` tells whether it is the last."""


class _Failures:
    """The workers that failed one choice, and how."""

    def __init__(self) -> None:
        self.boots: set[str] = set()
        self.last: LinkError | None = None
        self.suspect: Peer | None = None  # who is trying now
        self.num_in_a_row = 0
        self._num_tokens = 0  # when the last attempt failed

    def note(self, error: LinkError, num_tokens: int) -> None:
        """The suspect failed when the choice had so many tokens; it is not asked again before it was restarted."""
        assert self.suspect is not None
        self.boots.add(self.suspect.boot)
        self.suspect = None
        self.last = error
        self.num_in_a_row = 1 if num_tokens - self._num_tokens >= PROGRESS_TOKENS else self.num_in_a_row + 1
        self._num_tokens = num_tokens

    def wait_s(self, choice: Choice) -> float:
        """How long the next attempt may wait for a worker."""
        if isinstance(self.last, Overloaded):
            return 0.0
        was_lost = isinstance(self.last, PeerLost | RequestCancelled)
        return RESUME_WAIT_S if choice.output or was_lost else FIRST_WAIT_S

    def told(self, error: LinkError) -> LinkError:
        """What the client is told: a full worker rather than the lack of another one."""
        return self.last if isinstance(self.last, Overloaded) and isinstance(error, NoPeer) else error


class Generator:
    """Runs requests; one per processor."""

    def __init__(self, placer: Placer, workers: Client, ids: Iterator[str]) -> None:
        """`ids` mints the internal id of each attempt."""
        self._placer = placer
        self._workers = workers
        self._ids = ids

    @property
    def has_had_workers(self) -> bool:
        """Whether there was ever a worker that could generate."""
        return self._placer.pool.has_had_peers

    async def generate(self, choices: Sequence[Choice], sink: Sink) -> None:
        """Returns when every choice has finished. Raises the first `LinkError` that nothing could mend."""
        if len(choices) == 1:
            await self._run(choices[0], sink)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._run(choice, sink))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def explain(self, choice: Choice) -> Explanation:
        """How the choice would be placed now; nothing is placed."""
        request = self._placement_request(choice, _Failures())
        return await self._placer.explain(msgspec.structs.replace(request, is_explained=True))

    async def _run(self, choice: Choice, sink: Sink) -> None:
        if choice.finish is not None:  # as the trail of a lost processor tells
            return
        failed = _Failures()
        while True:
            choice.walk.attempts += 1
            started = time.monotonic()
            request = self._placement_request(choice, failed)
            try:
                async with self._placer.place(
                    request,
                    failed=failed.boots,
                    wait_s=failed.wait_s(choice),
                    is_takeover=choice.plan.is_takeover,
                ) as placement:
                    self._note(choice, placement, started)
                    failed.suspect = self._workers.peers.get(placement.worker)
                    await self._attempt(choice, placement, sink)
                    return
            except LinkError as error:
                if not may_retry(error) or failed.suspect is None:
                    raise failed.told(error) from None
                failed.note(error, len(choice.output))
                if failed.num_in_a_row == MAX_ATTEMPTS:
                    raise error from None

    def _placement_request(self, choice: Choice, failed: _Failures) -> PlacementRequest:
        plan = choice.plan
        tokens = plan.prompt_ids + pack_ids(choice.output)
        return PlacementRequest(
            id=next(self._ids),
            hashes=self._placer.hashes(tokens, plan.cache_salt),
            num_tokens=plan.num_prompt_tokens + len(choice.output),
            max_tokens=plan.stopping.max_tokens - len(choice.output),
            priority=plan.priority,
            disagg_request_id=plan.disagg_request_id or None,
            exclude=tuple(failed.boots),
        )

    def _generate_request(self, choice: Choice, placement: Placement) -> GenerateRequest:
        plan = choice.plan
        return GenerateRequest(
            id=next(self._ids),
            tokens=plan.prompt_ids + pack_ids(choice.output),
            num_prompt_tokens=plan.num_prompt_tokens,
            sampling=plan.sampling,
            stopping=plan.stopping,
            prefill=placement.prefill,
            disagg_request_id=placement.disagg_request_id,
            cache_salt=plan.cache_salt,
            priority=plan.priority,
            timing=plan.wants_timing,
        )

    async def _attempt(self, choice: Choice, placement: Placement, sink: Sink) -> None:
        """Streams from one worker until the choice has finished; raises the `LinkError` it ended in otherwise."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        has_ended = False

        def on_item(chunk: TokenChunk) -> None:
            if ended.done():
                return
            try:
                sink.add(choice, choice.take(chunk))
            except Exception as error:  # ours, not the link's: it ends this request alone
                ended.set_exception(error)
                return
            if choice.finish is not None and chunk.finish is None:  # a stop string: the worker would go on
                ended.set_result(None)

        def on_end(error: LinkError | None) -> None:
            nonlocal has_ended
            has_ended = True
            if ended.done():
                return
            if choice.finish is not None:
                ended.set_result(None)
            else:
                ended.set_exception(error or PeerFault(f"{placement.worker} ended without a finish reason"))

        call = self._workers.open(
            self._generate_request(choice, placement),
            peer=placement.worker,
            timeout_s=TOKEN_TIMEOUT_S,
            on_item=on_item,
            on_end=on_end,
        )
        try:
            await ended
        finally:
            if not has_ended:
                call.cancel()
            if ended.done() and not ended.cancelled():
                ended.exception()  # looked at, also when the request was cancelled in the same turn

    def _note(self, choice: Choice, placement: Placement, started: float) -> None:
        walk = choice.walk
        walk.worker, walk.prefill = placement.worker, placement.prefill
        walk.overlap_blocks, walk.reason = placement.overlap_blocks, placement.reason
        num_tokens = choice.plan.num_prompt_tokens + len(choice.output)
        walk.predicted_tokens = self._placer.predicted_tokens(placement, num_tokens)
        walk.place_ms += (time.monotonic() - started) * 1e3
