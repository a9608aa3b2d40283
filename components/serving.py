"""What all engine workers share: an engine behind a component, its streams, events, load, metrics.

Life of a request here: `generate` hands it to the engine and remembers its stream; each step's
report arrives on the event loop in one call and becomes one `TokenChunk` per sequence; the chunk
with `finish`, an `Ended` or the caller's cancel closes the stream, exactly once.
"""

from __future__ import annotations

import asyncio
import time
from itertools import count
from typing import Literal, Protocol

from components.engine.build import build_engine
from components.engine.engine import Engine
from components.engine.outputs import Ended, EngineRequest, Output, StepReport, StepTokens
from components.messages import (
    BLOCK_HASH_BYTES,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    GenerateRequest,
    Load,
    LoadChanged,
    Sampling,
    Stopping,
    Timing,
    TokenChunk,
    WorkerSnapshot,
    pack_ids,
    unpack_ids,
)
from components.metrics import EngineMetrics
from components.options import WorkerOptions
from graph import Context, Message, PeerFault, Publishes, Refused, Stream

_CANARY_PRIORITY = 1 << 30


class Watcher(Protocol):
    """What a worker that does more than generate adds to its `Serving`. Event loop's thread only."""

    def on_output(self, output: Output) -> None:
        """Called for every output of the engine, before a stream hears of it."""

    def dress(self, id: str, chunk: TokenChunk) -> TokenChunk:
        """The last word on a chunk before it leaves, e.g. to add what was cached elsewhere, or the timing."""


class Serving:
    """One engine and the streams of its requests. All methods belong to the event loop's thread."""

    engine: Engine

    def __init__(
        self,
        options: WorkerOptions,
        context: Context,
        *,
        role: Literal["worker", "prefill", "decode"],
        events: Publishes,
        watcher: Watcher | None = None,
    ) -> None:
        self._options = options
        self._context = context
        self._role: Literal["worker", "prefill", "decode"] = role
        self._events = events
        self._watcher = watcher
        self._walks: dict[str, _Walk] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._load = Load()
        self._hashes: dict[bytes, None] = {}  # what the events told so far
        self._canaries: dict[str, asyncio.Future[None]] = {}
        self._canary_numbers = count()
        self._has_engine = False

    async def start(self) -> None:
        """Loads the model and starts the engine; the event loop stays free meanwhile."""
        self._hash_unit = self._options.hash_unit or self._options.block_size
        self._publisher = self._context.publisher(self._events, self._snapshot)
        self._metrics = EngineMetrics(self._context.metrics)
        self.engine = await asyncio.to_thread(build_engine, self._options, self._context, self._on_report)
        self._has_engine = True
        self.engine.start()
        await self.alive()

    async def drain(self) -> None:
        """Returns when no stream is open any more."""
        await self._idle.wait()

    async def stop(self) -> None:
        """Ends what is still running as cancelled and frees the engine; also after a failed start."""
        if self._has_engine:
            await asyncio.to_thread(self.engine.stop)
            await asyncio.sleep(0)  # the engine's last report is delivered before this returns

    async def alive(self) -> None:
        """Sends a canary through the engine. Returns when it, or any other sequence, got a token.

        An engine without a free block cannot take the canary in: there a request that is refused at
        once shows that the engine's thread still turns.
        """
        canary = f"{self._context.boot}-canary-{next(self._canary_numbers)}"
        self._canaries[canary] = done = self._context.loop.create_future()
        is_full = self._load.blocks_total > 0 and self._load.blocks_used >= self._load.blocks_total
        try:
            self.engine.submit(
                EngineRequest(
                    id=canary,
                    tokens=[] if is_full else [0],
                    num_prompt_tokens=0 if is_full else 1,
                    sampling=Sampling(temperature=0.0),
                    stopping=Stopping(max_tokens=1),
                    priority=_CANARY_PRIORITY,
                )
            )
            await done
        finally:
            del self._canaries[canary]
            self.engine.abort(canary)

    def generate(
        self, request: GenerateRequest, stream: Stream, *, mode: Literal["generate", "remote"] = "generate"
    ) -> None:
        """Starts a request; its tokens go out on `stream`. Raises `Refused` for an id that is live already."""
        if request.id in self._walks:
            raise Refused(f"request {request.id} is already running here", code="duplicate_request")
        self.engine.submit(
            EngineRequest(
                id=request.id,
                tokens=unpack_ids(request.tokens),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                stopping=request.stopping,
                mode=mode,
                cache_salt=request.cache_salt,
                priority=request.priority,
            )
        )
        self._walks[request.id] = _Walk(request, stream, self._context.id)
        self._idle.clear()
        stream.on_cancel(lambda: self.engine.abort(request.id))

    def finish(self, output: StepTokens) -> None:
        """A request ended outside the engine: sends its last tokens, and drops the engine's sequence."""
        self.engine.abort(output.id)
        self._deliver_output(output)

    # --- reports

    def _on_report(self, report: StepReport) -> None:
        """Called on the engine's thread; the one hand-over per step."""
        self._context.loop.call_soon_threadsafe(self._deliver, report)

    def _deliver(self, report: StepReport) -> None:
        for output in report.outputs:
            self._deliver_output(output)
        for event in report.events:
            self._remember(event)
            self._publisher.publish(event)
        if report.load != self._load:
            self._load = report.load
            self._publisher.publish(LoadChanged(report.load))
        self._metrics.note(report)
        if self.engine.failure is not None:
            self._context.spawn(self._fail(self.engine.failure), name="engine failure")

    def _deliver_output(self, output: Output) -> None:
        if isinstance(output, StepTokens | Ended) and self._canaries:
            self._note_sign_of_life(output)
        if self._watcher is not None:
            self._watcher.on_output(output)
        walk = self._walks.get(output.id)
        if walk is None:
            return
        if isinstance(output, StepTokens):
            self._send(walk, output)
        elif isinstance(output, Ended):
            walk.stream.fail(output.error)
            self._forget(output.id)

    def _send(self, walk: _Walk, output: StepTokens) -> None:
        chunk = TokenChunk(
            tokens=pack_ids(output.tokens),
            logprobs=output.logprobs,
            finish=output.finish,
            cached_tokens=output.cached_tokens,
            timing=walk.timing(output),
        )
        if self._watcher is not None:
            chunk = self._watcher.dress(output.id, chunk)
        if output.finish is None:
            walk.stream.send(chunk)
        else:
            walk.stream.end(chunk)
            self._forget(output.id)

    def _forget(self, id: str) -> None:
        del self._walks[id]
        if not self._walks:
            self._idle.set()

    def _note_sign_of_life(self, output: StepTokens | Ended) -> None:
        error = output.error if isinstance(output, Ended) else None
        is_failure = isinstance(error, PeerFault) and output.id in self._canaries
        for canary in self._canaries.values():
            if not canary.done() and is_failure and error is not None:
                canary.set_exception(error)
            elif not canary.done() and (error is None or output.id in self._canaries):
                canary.set_result(None)

    def _remember(self, event: Message) -> None:
        match event:
            case BlocksStored():
                self._hashes.update(dict.fromkeys(_split(event.hashes)))
            case BlocksRemoved():
                for unit in _split(event.hashes):
                    self._hashes.pop(unit, None)
            case BlocksCleared():
                self._hashes.clear()

    def _snapshot(self) -> WorkerSnapshot:
        return WorkerSnapshot(self._role, self._hash_unit, self._load, b"".join(self._hashes))

    async def _fail(self, error: Exception) -> None:
        raise error


class _Walk:
    """One request on its way: its stream, and when it passed which point."""

    def __init__(self, request: GenerateRequest, stream: Stream, worker: str) -> None:
        self.stream = stream
        self._is_timed = request.timing
        self._worker = worker
        self._arrived_s = time.monotonic()
        self._first_token_s: float | None = None
        self._queue_ms = 0.0
        self._cached_tokens = 0

    def timing(self, output: StepTokens) -> Timing | None:
        """Notes the output, and tells the walk with the last one if it was asked for."""
        now_s = time.monotonic()
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._queue_ms = output.queue_ms or 0.0
            self._cached_tokens = output.cached_tokens or 0
        if output.finish is None or not self._is_timed:
            return None
        first_token_ms = (self._first_token_s - self._arrived_s) * 1e3
        return Timing(
            worker=self._worker,
            cached_tokens=self._cached_tokens,
            queue_ms=self._queue_ms,
            prefill_ms=max(0.0, first_token_ms - self._queue_ms),
            first_token_ms=first_token_ms,
            decode_ms=(now_s - self._first_token_s) * 1e3,
        )


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + BLOCK_HASH_BYTES] for i in range(0, len(hashes), BLOCK_HASH_BYTES)]
