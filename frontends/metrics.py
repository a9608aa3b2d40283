"""What one processor counts, and the meter that reads it off a request's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from frontends.choice import Choice, Delta
from frontends.generate import Sink

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (0, 16, 64, 256, 1_024, 4_096, 16_384)


class ProcessorMetrics:
    """The metrics of one processor replica."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ttft = Histogram("headrace_ttft_seconds", "Time to first token", registry=registry, buckets=_FIRST)
        self.itl = Histogram(
            "headrace_itl_seconds", "Time between a choice's chunks", registry=registry, buckets=_BETWEEN
        )
        self.e2e = Histogram("headrace_e2e_seconds", "Time of a whole request", registry=registry, buckets=_WHOLE)
        self.prompt_tokens = Counter("headrace_prompt_tokens", "Prompt tokens taken", registry=registry)
        self.cached_tokens = Counter("headrace_cached_tokens", "Prompt tokens nobody computed", registry=registry)
        self.predicted_overlap = Counter(
            "headrace_overlap_predicted_tokens",
            "Prompt tokens that the router expected to be cached",
            ["worker"],
            registry=registry,
        )
        self.actual_overlap = Counter(
            "headrace_overlap_actual_tokens",
            "Prompt tokens that were cached, of the same choices",
            ["worker"],
            registry=registry,
        )
        self.overlap_error = Histogram(
            "headrace_overlap_error_tokens",
            "Difference of predicted and actual overlap of a choice",
            registry=registry,
            buckets=_TOKENS,
        )
        self.generation_tokens = Counter("headrace_generation_tokens", "Tokens generated", registry=registry)
        self.replacements = Counter("headrace_replacements", "Choices given to another worker", registry=registry)
        self.finished = Counter("headrace_finished_choices", "Choices by reason", ["reason"], registry=registry)
        self.running = Gauge("headrace_running_streams", "Requests with tokens on the way", registry=registry)
        self.queue = Gauge("headrace_processor_queue", "Requests before their first token", registry=registry)


class Meter:
    """Stands before a request's sink and measures what passes; a context manager around the request's generation."""

    def __init__(self, sink: Sink, metrics: ProcessorMetrics, choices: Sequence[Choice], clock: Callable[[], float]):
        self._sink = sink
        self._metrics = metrics
        self._choices = choices
        self._clock = clock
        self._started = clock()
        # A choice that another processor began has had its first token.
        self._last: dict[int, float] = {c.plan.index: self._started for c in choices if c.output}

    def __enter__(self) -> Meter:
        gauge = self._metrics.running if self._last else self._metrics.queue
        gauge.inc()
        return self

    def __exit__(self, *exc: object) -> None:
        gauge = self._metrics.running if self._last else self._metrics.queue
        gauge.dec()
        self._metrics.e2e.observe(self._clock() - self._started)
        self._metrics.generation_tokens.inc(sum(len(choice.output) for choice in self._choices))
        firsts = {choice.plan.prompt: choice for choice in reversed(self._choices)}.values()
        self._metrics.prompt_tokens.inc(sum(choice.plan.num_prompt_tokens for choice in firsts))
        self._metrics.cached_tokens.inc(sum(choice.cached_tokens or 0 for choice in firsts))
        self._metrics.replacements.inc(sum(max(0, choice.walk.attempts - 1) for choice in self._choices))
        for choice in self._choices:
            self._metrics.finished.labels(choice.finish or "unfinished").inc()

    def add(self, choice: Choice, delta: Delta) -> None:
        """Called for every chunk of every choice."""
        now = self._clock()
        last = self._last.get(choice.plan.index)
        if last is not None:
            self._metrics.itl.observe(now - last)
        else:
            self._first(choice, now)
        self._last[choice.plan.index] = now
        self._sink.add(choice, delta)

    def _first(self, choice: Choice, now: float) -> None:
        choice.walk.first_token_ms = (now - self._started) * 1e3
        self._compare(choice)
        if not self._last:
            self._metrics.ttft.observe(now - self._started)
            self._metrics.queue.dec()
            self._metrics.running.inc()

    def _compare(self, choice: Choice) -> None:
        """Holds the router's expectation against what its worker, the first one, had."""
        walk, actual = choice.walk, choice.cached_tokens
        if walk.attempts != 1 or actual is None:
            return
        self._metrics.predicted_overlap.labels(walk.worker).inc(walk.predicted_tokens)
        self._metrics.actual_overlap.labels(walk.worker).inc(actual)
        self._metrics.overlap_error.observe(abs(walk.predicted_tokens - actual))
