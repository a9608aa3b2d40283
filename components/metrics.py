"""What an engine worker tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from components.engine.outputs import StepReport, StepStats

_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_COUNTERS = {
    "preemptions": ("preemptions", "sequences preempted for want of blocks"),
    "prompt_tokens": ("engine_prompt_tokens", "prompt tokens of all sequences, canaries too"),
    "cached_tokens": ("engine_cached_tokens", "prompt tokens found in the prefix cache"),
    "generated_tokens": ("engine_generated_tokens", "tokens generated"),
}


class EngineMetrics:
    """Gauges of the load, counters of the work, histograms of the steps. Event loop's thread only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"headrace_{name}", help, registry=registry)

        def counter(name: str, help: str) -> Counter:
            return Counter(f"headrace_{name}", help, registry=registry)

        self._running = gauge("requests_running", "sequences in the batch")
        self._waiting = gauge("requests_waiting", "sequences that wait, for room or for a transfer")
        self._used = gauge("kv_blocks_used", "KV blocks held by live sequences")
        self._total = gauge("kv_blocks_total", "KV blocks in the pool")
        self._cached = gauge("kv_blocks_cached", "KV blocks in the prefix cache, held or idle")
        self._quarantined = gauge("kv_blocks_quarantined", "KV blocks a transfer may still write into")
        self._computed = counter("engine_computed_tokens", "tokens computed, recomputed ones too")
        self._counters = {field: counter(*what) for field, what in _COUNTERS.items()}
        self._step_s = Histogram(
            "headrace_step_seconds", "time of an engine step", registry=registry, buckets=_STEP_BUCKETS_S
        )
        self._batch_size = Histogram(
            "headrace_batch_size", "sequences in a step", registry=registry, buckets=_BATCH_BUCKETS
        )
        self._last: StepStats | None = None

    def note(self, report: StepReport) -> None:
        """Takes in one report of the engine."""
        load, stats = report.load, report.stats
        self._running.set(load.running)
        self._waiting.set(load.waiting)
        self._used.set(load.blocks_used)
        self._total.set(load.blocks_total)
        self._quarantined.set(report.quarantined_blocks)
        if stats is None:
            return
        self._cached.set(stats.cached_blocks)
        self._computed.inc(stats.num_tokens)
        self._step_s.observe(stats.duration_s)
        self._batch_size.observe(stats.num_sequences)
        for field, counter in self._counters.items():
            counter.inc(getattr(stats, field) - (getattr(self._last, field) if self._last else 0))
        self._last = stats
