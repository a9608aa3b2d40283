"""The router: which workers serve a request.

Life of a placement:

    asked      a processor opened the stream; the label is claimed
    placed     the answer is sent; the placement counts on its workers
    ended      the processor closed the stream, or is gone: the label and the counts are free again

A request that cannot be placed is refused at once: `NoPeer` while nobody can generate, `Refused`
("conflict") for a label that is in use. The router is never in the token path.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from components import rules
from components.messages import LoadChanged, Placement, PlacementRequest, WorkerEvents, WorkerSnapshot
from components.routing.decide import decide
from components.routing.labels import Labels, Snowflake
from components.routing.policies import POLICIES, Question
from components.routing.workers import Workers
from graph import (
    Component,
    Context,
    GraphView,
    NodeView,
    NoPeer,
    Options,
    Peer,
    Refused,
    Serves,
    Stream,
    Subscribes,
    option,
)

RETRY_AFTER_S = 1.0


class RouterOptions(Options, frozen=True, kw_only=True):
    """Options of the router."""

    policy: Annotated[Literal["round_robin", "least_busy"], option("how a worker is chosen")] = "least_busy"


class Router(Component):
    """Places requests on workers. Never in the token path."""

    Options = RouterOptions
    max_replicas = 1  # each would know half of the placements
    placement = Serves(PlacementRequest, Placement)
    events = Subscribes(WorkerEvents, WorkerSnapshot, required=True)

    def __init__(self, options: RouterOptions) -> None:
        super().__init__(options)
        self._policy = POLICIES[options.policy]
        self._workers = Workers()
        self._turn = 0

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """Whoever asks can reach every worker that may be the answer."""
        return rules.reach_faults(node, graph)

    async def start(self, context: Context) -> None:
        """Follows the workers and serves placements."""
        snowflake = Snowflake(socket.gethostname(), os.getpid(), context.boot, lambda: time.time() * 1000)
        self._labels = Labels(snowflake)
        self._metrics = _Metrics(context, self._workers)
        context.subscribe(type(self).events, self)
        context.serve(type(self).placement, self._place)

    def on_snapshot(self, peer: Peer, snapshot: WorkerSnapshot) -> None:
        """A worker is ready, or told its state anew."""
        self._workers.learn(peer.id, peer.boot, snapshot.role, snapshot.load)

    def on_event(self, peer: Peer, event: Any) -> None:
        """Block events are for a policy that looks at blocks; loads are for all."""
        if isinstance(event, LoadChanged):
            self._workers.report(peer.id, event.load)

    def on_lost(self, peer: Peer) -> None:
        """A worker is ready no more."""
        self._workers.forget(peer.id)

    def _place(self, request: PlacementRequest, stream: Stream) -> None:
        label = self._claim(request)
        now_s = time.monotonic()
        question = Question(request.num_tokens, request.hashes, self._turn, random.random())
        decided = decide(self._workers.views(now_s), question, self._policy, request.exclude)
        if decided is None:
            self._labels.release(label)
            self._metrics.refused.labels("no_worker").inc()
            raise NoPeer("no worker is ready to generate; see graph status", retry_after_s=RETRY_AFTER_S)
        self._turn += 1
        placement = msgspec.structs.replace(decided, disagg_request_id=label)
        used = (placement.worker, placement.prefill) if placement.prefill else (placement.worker,)
        self._workers.place(stream.id, used, request.num_tokens, now_s)
        self._metrics.placed.labels("named" if placement.prefill else "none").inc()
        stream.on_cancel(lambda: self._end(stream.id, label))
        stream.send(placement)

    def _claim(self, request: PlacementRequest) -> int:
        try:
            return self._labels.claim(request.disagg_request_id, request.id)
        except Refused:
            self._metrics.refused.labels("conflict").inc()
            raise

    def _end(self, stream: str, label: int) -> None:
        self._workers.end(stream)
        self._labels.release(label)


class _Metrics:
    """What the router counts."""

    def __init__(self, context: Context, workers: Workers) -> None:
        from prometheus_client import Counter, Gauge

        registry = context.metrics
        self.placed = Counter(
            "headrace_router_placements",
            "Requests placed, with or without a prefill worker",
            ["prefill"],
            registry=registry,
        )
        self.refused = Counter(
            "headrace_router_refused", "Requests that were not placed, by reason", ["reason"], registry=registry
        )
        live = Gauge("headrace_router_live_placements", "Placements whose request still runs", registry=registry)
        live.set_function(lambda: workers.num_placements)
