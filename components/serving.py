"""What all engine workers share: an engine behind a component, its streams, events, load, metrics.

Life of a request here: `generate` hands it to the engine and remembers its stream; each step's
report arrives on the event loop in one call and becomes one `TokenChunk` per sequence; the chunk
with `finish`, an `Ended` or the caller's cancel closes the stream, exactly once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import count
from typing import Literal, Protocol

from components.engine.build import build_engine
from components.engine.engine import Engine
from components.engine.outputs import Ended, EngineRequest, Output, StepReport, StepTokens, is_urgent
from components.live import Live
from components.messages import (
    BLOCK_HASH_BYTES,
    MAX_LENGTH,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    GenerateRequest,
    Load,
    LoadChanged,
    Role,
    Sampling,
    Stopping,
    Timing,
    TokenChunk,
    WorkerSnapshot,
    pack_ids,
)
from components.metrics import EngineMetrics
from components.options import WorkerOptions
from components.ranks.team import Team
from graph import Context, Message, Publishes, Stream

_CANARY_PRIORITY = 1 << 30
_MAX_YIELD_S = 0.002
"""How long the engine holds back at most for what is urgent: a loop that is busy with more does not stop it."""
_NO_PARENT = bytes(BLOCK_HASH_BYTES)


class Watcher(Protocol):
    """What a worker that does more than generate adds to its `Serving`. Event loop's thread only."""

    def on_output(self, output: Output) -> None:
        """Called for every output of the engine, before a stream hears of it."""

    def on_report(self, report: StepReport) -> None:
        """Called for every report of the engine, after its outputs."""

    def dress(self, id: str, chunk: TokenChunk) -> TokenChunk:
        """The last word on a chunk before it leaves, e.g. to add what was cached elsewhere, or the timing."""


class Serving:
    """One engine and the streams of its requests. All methods belong to the event loop's thread."""

    engine: Engine
    team: Team | None = None  # the other ranks, if there are any

    def __init__(
        self,
        options: WorkerOptions,
        context: Context,
        *,
        role: Role,
        events: Publishes,
        watcher: Watcher | None = None,
    ) -> None:
        self._options = options
        self._context = context
        self._role: Role = role
        self._events = events
        self._watcher = watcher
        self._walks: Live[_Walk] = Live("request")
        self._load = Load()
        self._parents: dict[bytes, bytes] = {}  # what the events told so far: hash -> the one before it
        self._canaries: dict[str, asyncio.Future[Output]] = {}
        self._canary_numbers = count()
        self._has_engine = False
        self._has_failed = False

    async def start(self) -> None:
        """Loads the model and starts the engine; the event loop stays free meanwhile."""
        self._hash_unit = self._options.hash_unit or self._options.block_size
        self._publisher = self._context.publisher(self._events, self._snapshot)
        self._metrics = EngineMetrics(self._context.metrics)
        if self._context.tp > 1:
            self.team = Team(self._context, self._context.tp)
            await self.team.start(self._options)
        self.engine = await asyncio.to_thread(build_engine, self._options, self._context, self._on_report, self.team)
        self._has_engine = True
        if self.team is not None:
            await self.team.join()
        self._context.announce(**{MAX_LENGTH: self.engine.max_length})
        self.engine.start()
        answer = await self._try_engine()
        if isinstance(answer, Ended):
            raise answer.error

    async def drain(self) -> None:
        """Returns when no stream is open any more."""
        await self._walks.drained()

    async def stop(self) -> None:
        """Ends what is still running as cancelled and frees the engine; also after a failed start."""
        if self._has_engine:
            await asyncio.to_thread(self.engine.stop)
            await asyncio.sleep(0)  # the engine's last report is delivered before this returns
        if self.team is not None:
            await self.team.close()

    async def alive(self) -> None:
        """Returns when a canary has got its token, or when the engine had a whole round and no room for it.

        Raises what the engine ended in, if it gave up.
        """
        await self._try_engine()
        if self.engine.failure is not None:
            raise self.engine.failure

    async def _try_engine(self) -> Output | None:
        """The answer to a canary, a one-token request ahead of all others; None if it found no room.

        Empty requests behind it are refused at the start of a round: once the second one is, all of
        the round that could have taken the canary in has passed, its step included.
        """
        mine: dict[str, asyncio.Future[Output]] = {}
        try:
            canary = self._send_canary([0], mine)
            await asyncio.wait((canary, self._send_canary([], mine)), return_when=asyncio.FIRST_COMPLETED)
            if not canary.done():
                await asyncio.wait((canary, self._send_canary([], mine)), return_when=asyncio.FIRST_COMPLETED)
            return canary.result() if canary.done() else None
        finally:
            for id in mine:
                self.engine.abort(id)
                self._canaries.pop(id, None)

    def _send_canary(self, tokens: list[int], sent: dict[str, asyncio.Future[Output]]) -> asyncio.Future[Output]:
        id = f"{self._context.boot}-canary-{next(self._canary_numbers)}"
        self._canaries[id] = sent[id] = answer = self._context.loop.create_future()
        self.engine.submit(
            EngineRequest(
                id=id,
                tokens=tokens,
                num_prompt_tokens=len(tokens),
                sampling=Sampling(temperature=0.0),
                stopping=Stopping(max_tokens=1),
                priority=_CANARY_PRIORITY,
            )
        )
        return answer

    def generate(
        self, request: GenerateRequest, stream: Stream, *, mode: Literal["generate", "remote"] = "generate"
    ) -> None:
        """Starts a request; its tokens go out on `stream`. Raises `Refused` for an id that is live already."""
        self._walks.check_new(request.id)
        self.engine.submit(EngineRequest.of(request, mode=mode))
        self._walks.add(request.id, _Walk(request, stream, self._context.id))
        stream.on_cancel(lambda: self.engine.abort(request.id))

    def finish(self, output: StepTokens) -> None:
        """A request ended outside the engine: sends its last tokens, and drops the engine's sequence."""
        self.engine.abort(output.id)
        self._deliver_output(output)

    # --- reports

    def _on_report(self, report: StepReport) -> None:
        """Called on the engine's thread; the one hand-over per step. Without its loop the process is ending.

        The engine goes on to launch the next step, in Python all the way, and would keep the interpreter from the loop
        for up to its switch interval of 5 ms. So it holds back until what is urgent has been sent.
        """
        if self._context.loop.is_closed():
            return
        self._context.loop.call_soon_threadsafe(self._deliver, report)
        if any(map(is_urgent, report.outputs)):
            sent = threading.Event()
            self._context.loop.call_soon_threadsafe(self._context.loop.call_soon, sent.set)  # behind the outboxes
            sent.wait(_MAX_YIELD_S)

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
        if self._watcher is not None:
            self._watcher.on_report(report)
        if self.engine.failure is not None and not self._has_failed:
            self._has_failed = True
            self._context.spawn(self._fail(self.engine.failure), name="engine failure")

    def _deliver_output(self, output: Output) -> None:
        if output.id in self._canaries:
            _resolve(self._canaries.pop(output.id), output)
            return
        if self._watcher is not None:
            self._watcher.on_output(output)
        walk = self._walks.get(output.id)
        if walk is None:
            return
        if isinstance(output, StepTokens):
            self._send(walk, output)
        elif isinstance(output, Ended):
            self._walks.fail(output)

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
            self._walks.remove(output.id).stream.end(chunk)

    def _remember(self, event: Message) -> None:
        match event:
            case BlocksStored():
                units = _split(event.hashes)
                self._parents.update(zip(units, (event.parent or _NO_PARENT, *units[:-1]), strict=True))
            case BlocksRemoved():
                for unit in _split(event.hashes):
                    self._parents.pop(unit, None)
            case BlocksCleared():
                self._parents.clear()

    def _snapshot(self) -> WorkerSnapshot:
        hashes, parents = b"".join(self._parents), b"".join(self._parents.values())
        return WorkerSnapshot(self._role, self._hash_unit, self._load, hashes, parents)

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


def _resolve(answer: asyncio.Future[Output], output: Output) -> None:
    if not answer.done():  # cancelled, with the one who asked
        answer.set_result(output)


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + BLOCK_HASH_BYTES] for i in range(0, len(hashes), BLOCK_HASH_BYTES)]
