"""What the router counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from components.routing.admission import AdmissionQueue
from components.routing.blocks import Blocks
from components.routing.workers import Workers

_DECISION_S = (25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 5e-3, 25e-3)
_WAIT_S = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class RouterMetrics:
    """The metrics of one router. What hangs in the air is read from the books when asked for."""

    def __init__(self, registry: CollectorRegistry, workers: Workers, blocks: Blocks, queue: AdmissionQueue) -> None:
        placed = Counter(
            "headrace_router_placements",
            "Requests placed, with or without a prefill worker",
            ["prefill"],
            registry=registry,
        )
        self.placed_with_prefill, self.placed_alone = placed.labels("named"), placed.labels("none")
        self.refused = Counter(
            "headrace_router_refused", "Requests that were not placed, by reason", ["reason"], registry=registry
        )
        self.shed = Counter(
            "headrace_router_shed", "Requests shed because all workers were full", ["reason"], registry=registry
        )
        self.decision = Histogram(
            "headrace_router_decision_seconds", "Time to decide a placement", registry=registry, buckets=_DECISION_S
        )
        self.wait = Histogram(
            "headrace_router_wait_seconds", "Time that queued placements waited", registry=registry, buckets=_WAIT_S
        )
        live = Gauge("headrace_router_live_placements", "Placements whose request still runs", registry=registry)
        live.set_function(lambda: workers.num_placements)
        waiting = Gauge("headrace_router_waiting", "Placements that wait for a worker", registry=registry)
        waiting.set_function(lambda: len(queue))
        self._blocks = blocks
        self._worker_blocks = Gauge(
            "headrace_router_worker_blocks", "Hash units the index knows at a worker", ["worker"], registry=registry
        )
        self._add_index(registry)

    def follow(self, id: str, boot: str) -> None:
        """A worker is known; its blocks are told from now on."""
        self._worker_blocks.labels(id).set_function(lambda: self._blocks.index.count(boot))

    def leave(self, id: str) -> None:
        """A worker is known no more."""
        self._worker_blocks.remove(id)

    def _add_index(self, registry: CollectorRegistry) -> None:
        index = self._blocks.index
        size = Gauge("headrace_router_index_blocks", "Different hash units in the index", registry=registry)
        size.set_function(lambda: len(index))
        memory = Gauge("headrace_router_index_bytes", "About the memory of the index", registry=registry)
        memory.set_function(lambda: index.num_bytes)
        dropped = Gauge(
            "headrace_router_index_dropped_blocks", "Hash units left out of a full index so far", registry=registry
        )
        dropped.set_function(lambda: index.num_dropped)
