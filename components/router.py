"""The router: which workers serve a request.

Life of a placement:

    asked      a processor opened the stream; the label is claimed
    waiting    every worker is full: queued by priority, and shed if that takes too long
    placed     the answer is sent; the placement counts on its workers
    ended      the processor closed the stream, or is gone: the label and the counts are free again

A request that cannot be placed is refused: `NoPeer` while nobody can generate, `Refused` ("conflict") for a
label that is in use, `Overloaded` when it is shed. The router is never in the token path.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from components import rules
from components.messages import (
    Explanation,
    LoadChanged,
    Placement,
    PlacementQueued,
    PlacementRequest,
    WorkerEvents,
    WorkerSnapshot,
)
from components.options import HashUnit
from components.routing.admission import AdmissionQueue, Waiting
from components.routing.blocks import Blocks
from components.routing.decide import able, decide, generating, with_room
from components.routing.explain import explain
from components.routing.index import block_keys
from components.routing.labels import Labels, Snowflake
from components.routing.metrics import RouterMetrics
from components.routing.policies import POLICIES, Question
from components.routing.view import WorkerView
from components.routing.workers import Workers
from graph import (
    Component,
    Context,
    GraphView,
    LinkError,
    Natural,
    NodeView,
    NoPeer,
    Options,
    Peer,
    Positive,
    Refused,
    Serves,
    Stream,
    Subscribes,
    Time,
    option,
)

RETRY_AFTER_S = 1.0

log = logging.getLogger(__name__)


class RouterOptions(Options, frozen=True, kw_only=True):
    """Options of the router."""

    policy: Annotated[Literal["round_robin", "least_busy", "kv"], option("how a worker is chosen")] = "least_busy"
    hash_unit: HashUnit = 0
    max_indexed_blocks: Annotated[Natural, option("different blocks the index holds, about 100 bytes each")] = 4_000_000
    max_worker_requests: Annotated[Positive, option("requests at which a worker is full and gets no more")] = 2_000
    max_waiting: Annotated[Natural, option("requests that wait for a worker with room before some are shed")] = 1_000
    max_wait_s: Annotated[Time, option("longest wait for a worker with room; then the request is shed")] = 5.0


class Router(Component):
    """Places requests on workers. Never in the token path."""

    Options = RouterOptions
    max_replicas = 1  # each would know half of the placements
    placement = Serves(PlacementRequest, (PlacementQueued, Placement, Explanation))
    events = Subscribes(WorkerEvents, WorkerSnapshot, required=True)

    options: RouterOptions

    def __init__(self, options: RouterOptions) -> None:
        super().__init__(options)
        self._policy = POLICIES[options.policy]
        self._blocks = Blocks(options.max_indexed_blocks)
        self._workers = Workers(self._blocks, hash_unit=options.hash_unit)
        self._queue = AdmissionQueue(options.max_waiting)
        self._timer: asyncio.TimerHandle | None = None
        self._luck = random.Random()
        self._turn = 0

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """Whoever asks can reach every worker that may be the answer."""
        return rules.reach_faults(node, graph)

    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        """The hash unit that is the same all over the graph."""
        return rules.resolve_hash_unit(node, graph)

    async def start(self, context: Context) -> None:
        """Follows the workers and serves placements."""
        self._loop = context.loop
        self._luck.seed(context.boot)
        snowflake = Snowflake(socket.gethostname(), os.getpid(), context.boot, lambda: time.time() * 1000)
        self._labels = Labels(snowflake)
        self._metrics = RouterMetrics(context.metrics, self._workers, self._blocks, self._queue)
        context.subscribe(type(self).events, self)
        context.serve(type(self).placement, self._take)

    # --- what the workers tell

    def on_snapshot(self, peer: Peer, snapshot: WorkerSnapshot) -> None:
        """A worker is ready, or told its state anew."""
        if not self._workers.hash_unit:
            self._workers.hash_unit = snapshot.hash_unit
        if snapshot.hash_unit != self._workers.hash_unit:
            log.error(
                "%s hashes units of %d tokens, this router of %d: its cache will never be found; set hash_unit alike",
                peer.id, snapshot.hash_unit, self._workers.hash_unit,
            )  # fmt: skip
        self._workers.learn(peer.id, peer.boot, snapshot)
        self._metrics.follow(peer.id, peer.boot)
        log.info(
            "%s is known: %d blocks of %d tokens in its cache",
            peer.id, self._blocks.index.count(peer.boot), snapshot.hash_unit,
        )  # fmt: skip
        self._admit()

    def on_event(self, peer: Peer, event: Any) -> None:
        """A worker's cache or load has changed."""
        self._workers.apply(peer.id, event)
        if isinstance(event, LoadChanged):
            self._admit()

    def on_lost(self, peer: Peer) -> None:
        """A worker is ready no more."""
        self._workers.forget(peer.id)
        self._metrics.leave(peer.id)
        self._admit()

    # --- what the processors ask

    def _take(self, request: PlacementRequest, stream: Stream) -> None:
        keys = block_keys(request.hashes)
        if request.is_explained:
            stream.end(self._explain(request, keys))
            return
        waiting = Waiting(request, stream, self._claim(request), keys)
        try:
            if not (self._is_next(waiting) and self._place(waiting)):
                self._wait(waiting)
        except LinkError:
            self._labels.release(waiting.label)
            raise

    def _claim(self, request: PlacementRequest) -> int:
        try:
            return self._labels.claim(request.disagg_request_id, request.id)
        except Refused:
            self._metrics.refused.labels("conflict").inc()
            raise

    def _question(self, request: PlacementRequest, overlaps: Mapping[str, int]) -> Question:
        return Question(request.num_tokens, self._workers.hash_unit, overlaps, self._turn, self._luck.random())

    def _place(self, waiting: Waiting) -> bool:
        """Answers with a placement, unless every worker is full. Raises `NoPeer` if none can generate."""
        began_s, now_s, request = time.perf_counter(), self._loop.time(), waiting.request
        views = able(self._workers.views(now_s), request.exclude)
        question = self._question(request, self._blocks.overlaps(waiting.keys))
        decided = decide(self._open(views, request), question, self._policy)
        self._metrics.decision.observe(time.perf_counter() - began_s)
        if decided is None:
            if generating(views):
                return False
            self._metrics.refused.labels("no_worker").inc()
            raise NoPeer("no worker is ready to generate; see graph status", retry_after_s=RETRY_AFTER_S)
        self._turn += 1
        stream, label = waiting.stream, waiting.label
        stream.send(msgspec.structs.replace(decided, disagg_request_id=label))  # nobody waits for the books
        self._book(waiting, decided, now_s)
        stream.on_cancel(lambda: self._end(stream.id, label))
        return True

    def _open(self, views: Iterable[WorkerView], request: PlacementRequest) -> list[WorkerView]:
        """The workers that may get it; one that was admitted before and failed is not stopped again."""
        return with_room(views, self.options.max_worker_requests if not request.exclude else None)

    def _book(self, waiting: Waiting, placement: Placement, now_s: float) -> None:
        stages = [(placement.worker, placement.overlap_blocks)]
        if placement.prefill is None:
            self._metrics.placed_alone.inc()
        else:
            stages.append((placement.prefill, placement.prefill_overlap_blocks))
            self._metrics.placed_with_prefill.inc()
        self._workers.place(waiting.stream.id, stages, waiting.keys, waiting.request.num_tokens, now_s)

    def _end(self, stream: str, label: int) -> None:
        self._workers.end(stream)
        self._labels.release(label)
        self._queue.note_end(self._loop.time())
        self._admit()

    def _explain(self, request: PlacementRequest, keys: list[int]) -> Explanation:
        views = able(self._workers.views(self._loop.time()), request.exclude)
        question = self._question(request, self._blocks.overlaps(keys))
        candidates = self._open(views, request)
        return explain(
            views,
            candidates,
            question,
            policy=self.options.policy,
            placement=decide(candidates, question, self._policy),
            cached=self._blocks.cached(keys),
        )

    # --- those that wait

    def _is_next(self, waiting: Waiting) -> bool:
        """Whether nobody who waits goes first."""
        first = self._queue.first
        return first is None or waiting.request.priority > first.request.priority or bool(waiting.request.exclude)

    def _wait(self, waiting: Waiting) -> None:
        """Queues a request. Raises `Overloaded` if it is shed at once."""
        waiting.deadline_s = self._loop.time() + self.options.max_wait_s
        shed = self._queue.push(waiting)
        if shed is waiting:
            self._metrics.shed.labels("queue_full").inc()
            raise self._queue.refusal(self._loop.time())
        if shed is not None:
            self._shed(shed, "queue_full")
        waiting.stream.on_cancel(lambda: self._leave(waiting))
        waiting.stream.send(PlacementQueued(self.options.max_wait_s))
        self._set_timer()

    def _leave(self, waiting: Waiting) -> None:
        """Its processor is gone; after its placement there is nothing to do any more."""
        if self._queue.remove(waiting):
            self._labels.release(waiting.label)

    def _admit(self) -> None:
        """Places those who wait, in order, as long as there is room."""
        while (waiting := self._queue.first) is not None:
            self._queue.pop()
            try:
                if not self._place(waiting):
                    self._queue.put_back(waiting)
                    return
            except LinkError as error:
                self._fail(waiting, error)
            else:
                self._metrics.wait.observe(self._loop.time() - waiting.deadline_s + self.options.max_wait_s)

    def _shed(self, waiting: Waiting, reason: str) -> None:
        self._metrics.shed.labels(reason).inc()
        self._fail(waiting, self._queue.refusal(self._loop.time()))

    def _fail(self, waiting: Waiting, error: LinkError) -> None:
        self._labels.release(waiting.label)
        waiting.stream.fail(error)

    def _set_timer(self) -> None:
        """Wakes up when the next one has waited too long."""
        deadline_s = self._queue.next_deadline_s
        if self._timer is None and deadline_s is not None:
            self._timer = self._loop.call_at(deadline_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for waiting in self._queue.take_expired(self._loop.time()):
            self._shed(waiting, "timeout")
        self._set_timer()
