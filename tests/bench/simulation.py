"""The real router against simulated workers on a virtual clock: a trace in, the fate of each request out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from simulated_worker import Sequence as Work
from simulated_worker import SimulatedWorker, Speed
from traces import BLOCK_TOKENS, Request
from virtual import VirtualLoop

from components.messages import Load, LoadChanged, Placement, PlacementRequest, WorkerSnapshot
from components.router import Router, RouterOptions
from graph import LinkError, Message, Peer

HOP_S = 0.001
"""How long a message takes between two processes."""


class Fate(msgspec.Struct):
    """What became of one request; times in s since its arrival."""

    request: Request
    worker: str | None = None
    predicted_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float | None = None
    e2e_s: float | None = None  # None: shed


class SimulatedStream:
    """The router's half of one placement."""

    peer = "processor/0"

    def __init__(self, number: int, on_item: Callable[[Any], None], on_error: Callable[[LinkError], None]) -> None:
        self.id = f"stream-{number}"
        self.is_closed = False
        self._on_item = on_item
        self._on_error = on_error
        self._callbacks: list[Callable[[], None]] = []

    def send(self, item: Message) -> None:
        """A reply."""
        self._on_item(item)

    def fail(self, error: LinkError) -> None:
        """The end in an error."""
        self.is_closed = True
        self._on_error(error)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """As a stream's."""
        self._callbacks.append(callback)

    def close(self) -> None:
        """The processor closes it."""
        if not self.is_closed:
            self.is_closed = True
            for callback in self._callbacks:
                callback()


class SimulatedContext:
    """What the router is given: the virtual clock, and the two ends of its ports."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.boot = "simulated"
        self.loop = loop
        self.metrics = CollectorRegistry()
        self.take: Callable[[PlacementRequest, SimulatedStream], None]
        self.subscription: Any

    def serve(self, port: object, handler: Any) -> None:
        """The router's handler."""
        self.take = handler

    def subscribe(self, port: object, subscription: Any) -> None:
        """The router as a subscriber."""
        self.subscription = subscription


class Simulation:
    """One router and `num_workers` workers."""

    def __init__(self, options: RouterOptions, *, num_workers: int, speed: Speed) -> None:
        self.loop = VirtualLoop()
        self.context = SimulatedContext(self.loop)
        self.fates: list[Fate] = []
        self.workers: dict[str, SimulatedWorker] = {}
        router = Router(msgspec.structs.replace(options, hash_unit=BLOCK_TOKENS))
        start = router.start(self.context)  # type: ignore[arg-type]
        for _ in start.__await__():
            raise AssertionError("the router waits for something at its start")
        for index in range(num_workers):
            self._add_worker(Peer(f"worker/{index}", f"boot-{index}", ""), speed)

    def run(self, trace: Iterable[Request]) -> list[Fate]:
        """Plays a trace to its end."""
        for number, request in enumerate(trace):
            self.loop.call_at(request.timestamp / 1e3, self._arrive, number, request)
        self.loop.run()
        return self.fates

    def _add_worker(self, peer: Peer, speed: Speed) -> None:
        told = Load()

        def publish(events: Sequence[Message], load: Load) -> None:
            nonlocal told
            for event in events:
                self.loop.call_later(HOP_S, self.context.subscription.on_event, peer, event)
            if load != told:
                told = load
                self.loop.call_later(HOP_S, self.context.subscription.on_event, peer, LoadChanged(load))

        worker = SimulatedWorker(self.loop, speed, publish)
        self.workers[peer.id] = worker
        self.context.subscription.on_snapshot(peer, WorkerSnapshot("worker", BLOCK_TOKENS, worker.load()))

    def _arrive(self, number: int, request: Request) -> None:
        fate, arrived_s = Fate(request), self.loop.time()
        self.fates.append(fate)

        def on_first(cached_tokens: int) -> None:
            fate.cached_tokens = cached_tokens
            fate.ttft_s = self.loop.time() - arrived_s

        def on_finish() -> None:
            fate.e2e_s = self.loop.time() - arrived_s
            self.loop.call_later(HOP_S, stream.close)

        def on_item(item: Message) -> None:
            if isinstance(item, Placement):
                fate.worker, fate.predicted_tokens = item.worker, item.overlap_blocks * BLOCK_TOKENS
                worker = self.workers[item.worker]
                self.loop.call_later(2 * HOP_S, worker.submit, Work(request, on_first, on_finish))

        stream = SimulatedStream(number, on_item, lambda error: None)
        asked = PlacementRequest(
            id=str(number), hashes=request.hashes, num_tokens=request.input_length, max_tokens=request.output_length
        )
        try:
            self.context.take(asked, stream)
        except LinkError:
            stream.is_closed = True  # shed at once


def bound(trace: Iterable[Request], speed: Speed) -> list[Fate]:
    """What no placement can beat: every block is computed once and kept for ever, and nobody waits for anybody."""
    known: set[int] = set()
    fates = []
    for request in trace:
        full = request.hash_ids[: (request.input_length - 1) // BLOCK_TOKENS]
        num_cached = next((i for i, id in enumerate(full) if id not in known), len(full))
        known.update(request.hash_ids[: request.input_length // BLOCK_TOKENS])
        missing = request.input_length - num_cached * BLOCK_TOKENS
        num_steps = -(-missing // speed.max_tokens)
        ttft_s = num_steps * speed.step_s + missing * speed.prefill_token_s
        decode_s = speed.step_s + speed.decode_sequence_s + speed.context_token_s * request.input_length
        fates.append(
            Fate(
                request,
                cached_tokens=num_cached * BLOCK_TOKENS,
                ttft_s=ttft_s,
                e2e_s=ttft_s + (request.output_length - 1) * decode_s,
            )
        )
    return fates
