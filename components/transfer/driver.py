"""The driver: the one thread that makes an agent, posts its READs and polls them.

The event loop talks to it through commands and hears back through `call_soon_threadsafe`; the
engine's step loop never touches it. It turns tightly while a READ is in flight, often while peers
may be reading from here (`watch`), and now and then otherwise.

Life of a READ: queued (waits for the thread) -> posted -> settled, told in one `ReadResult`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from components.messages import RankRegion
from components.transfer.agent import TransferAgent, TransferError
from components.transfer.plan import Route
from components.transfer.probe import Speed, self_test
from components.transfer.reads import OnResult, Part, ReadResult

IDLE_TICK_S = 0.05
WATCH_TICK_S = 0.001
READ_TICK_S = 0.0001
SPIN_S = 0.002  # most READs between GPUs end in this time, and a tick would be a good part of it

logger = logging.getLogger(__name__)


class _Read(msgspec.Struct, eq=False):
    """A READ on its way."""

    parts: Sequence[Part]
    on_result: OnResult
    queued_s: float
    begun_s: float = 0.0
    posted_s: float = 0.0
    pending: set[int] = msgspec.field(default_factory=set)
    error: str | None = None

    def result(self, now: float) -> ReadResult:
        return ReadResult(
            error=self.error,
            descriptors=sum(p.count for _, p in self.parts),
            num_bytes=sum(p.num_bytes for _, p in self.parts),
            wait_ms=(self.begun_s - self.queued_s) * 1e3,
            post_ms=(self.posted_s - self.begun_s) * 1e3,
            wire_ms=(now - self.posted_s) * 1e3,
        )


class TransferDriver:
    """Owns one agent and its thread. All methods belong to the event loop's thread."""

    def __init__(self, make_agent: Callable[[], TransferAgent]) -> None:
        """`make_agent` is called on the driver's thread: on CUDA it is where the device must be set."""
        self._make_agent = make_agent
        self._commands: deque[Callable[[TransferAgent], None]] = deque()
        self._wake = threading.Event()
        self._reads: list[_Read] = []  # the thread's own
        self._is_watching = False
        self._watch_until_s = 0.0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None
        self._testing = asyncio.Lock()

    async def start(self) -> RankRegion:
        """Makes the agent; returns what peers must know of it. Raises `TransferError`."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        ready: asyncio.Future[RankRegion] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="transfer", daemon=True)
        self._thread.start()
        return await ready

    async def run(self) -> None:
        """Returns when the thread has ended; raises what it died of."""
        if self._ended is not None:
            await asyncio.shield(self._ended)

    async def alive(self) -> None:
        """Returns when the thread has made a turn."""
        turned: asyncio.Future[None] = self._loop.create_future()
        self._submit(lambda agent: self._tell(_resolve, turned, None))
        await turned

    async def link(self, peer: RankRegion, way: Route) -> Speed | None:
        """Makes a peer's rank readable and tests it: one test at a time. Raises `TransferError`."""
        await self.connect(peer, way)
        try:
            async with self._testing:
                return await self_test(self.read, self._region, peer, way)
        except TransferError:
            self.disconnect(peer.agent)
            raise

    async def connect(self, peer: RankRegion, way: Route) -> None:
        """Makes a peer's rank readable. Raises `TransferError`."""
        connected: asyncio.Future[None] = self._loop.create_future()

        def connect(agent: TransferAgent) -> None:
            try:
                agent.connect(peer, way)
            except TransferError as error:
                self._tell(_fail, connected, error)
            else:
                self._tell(_resolve, connected, None)

        self._submit(connect)
        await connected

    def disconnect(self, agent: str) -> None:
        """Forgets a peer's rank."""
        self._submit(lambda own: own.disconnect(agent))

    def read(self, parts: Sequence[Part], on_result: OnResult) -> None:
        """Starts a READ; `on_result` comes exactly once, when no byte of it can land any more."""
        read = _Read(parts, on_result, time.monotonic())
        self._submit(lambda agent: self._post(agent, read))

    def watch(self, is_on: bool) -> None:
        """Whether peers may be reading from here: then their READs need our progress."""
        if is_on != self._is_watching:
            self._is_watching = is_on
            self._wake.set()

    def watch_for(self, seconds: float) -> None:
        """Like `watch(True)`, for a while: a peer connects and tests the connection."""
        self._watch_until_s = time.monotonic() + seconds
        self._wake.set()

    async def close(self, timeout_s: float = 2.0) -> None:
        """Waits a while for READs in flight, then frees the agent and ends the thread."""
        if self._thread is None:
            return
        self._close_by_s = time.monotonic() + timeout_s
        self._is_closing = True
        self._wake.set()
        thread, self._thread = self._thread, None
        await asyncio.to_thread(thread.join)

    def _submit(self, command: Callable[[TransferAgent], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    def _run(self, ready: asyncio.Future[RankRegion]) -> None:
        try:
            agent = self._make_agent()
        except TransferError as error:
            self._tell(_fail, ready, error)
            return
        self._region = agent.region
        self._tell(_resolve, ready, agent.region)
        try:
            while not self._is_closing or (self._reads and time.monotonic() < self._close_by_s):
                self._turn(agent)
                self._rest()
            agent.close()
        except Exception as error:  # a bug of ours: whoever awaits `run` dies of it
            self._tell(_fail, self._ended, error)
        else:
            self._tell(_resolve, self._ended, None)

    def _turn(self, agent: TransferAgent) -> None:
        """One turn: new commands, the transport's work, READs that have ended."""
        while self._commands:
            self._commands.popleft()(agent)
        agent.progress()
        for read in list(self._reads):
            self._poll(agent, read)

    def _rest(self) -> None:
        if self._reads:
            is_fresh = time.monotonic() - self._reads[-1].posted_s < SPIN_S
            time.sleep(0 if is_fresh else READ_TICK_S)  # either way others get the interpreter
            return
        is_watching = self._is_watching or time.monotonic() < self._watch_until_s
        if self._wake.wait(WATCH_TICK_S if is_watching else IDLE_TICK_S):
            self._wake.clear()

    def _post(self, agent: TransferAgent, read: _Read) -> None:
        read.begun_s = time.monotonic()
        for name, pieces in read.parts:
            try:
                read.pending.add(agent.post(name, pieces))
            except TransferError as error:
                read.error = str(error)
                break
        read.posted_s = time.monotonic()
        self._reads.append(read)
        self._poll(agent, read)

    def _poll(self, agent: TransferAgent, read: _Read) -> None:
        for handle in list(read.pending):
            state = agent.poll(handle)
            if state != "pending":
                read.pending.discard(handle)
            if state == "failed":
                read.error = read.error or "the transport reported an error"
        if not read.pending:
            self._reads.remove(read)
            self._tell(read.on_result, read.result(time.monotonic()))

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        self._loop.call_soon_threadsafe(callback, *args)


def _resolve(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
