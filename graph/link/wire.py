"""What a link needs of a transport, and the outbox in which frames wait for it.

A transport carries whole wire messages, in order, between one listener and many dialers, and tells
when it can take no more. Everything else (streams, deadlines, bounds) is the same on all transports.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from graph.link.codec import Batch

BATCH_BYTES = 1 << 20
"""A wire message that has grown this large leaves at once instead of at the end of the turn."""


LINGER_S = 0.2
"""How long a closed line may still try to send its last words."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one replica's links."""

    backlog_bytes: int = 64 << 20  # per peer, what may wait for a transport that is full
    event_backlog_bytes: int = 8 << 20  # per subscriber; beyond it events are dropped, and a snapshot follows
    inbox_items: int = 16_384  # per iterated call, replies not yet consumed
    inbox_bytes: int = 64 << 20


class LineDown(Exception):
    """The other end of a line is gone; nothing can be sent on it any more."""


class Dialer(Protocol):
    """The caller's end of one line."""

    def send(self, data: bytearray) -> bool:
        """Sends one wire message, or returns False and calls `on_writable` later."""

    def close(self, linger_s: float) -> None:
        """Closes the line, trying for at most `linger_s` to send what it has taken."""


class Listener(Protocol):
    """The server's end of all lines that reach it."""

    @property
    def address(self) -> str:
        """Where dialers reach it."""

    def send(self, line: bytes, data: bytearray) -> bool:
        """Like `Dialer.send`, to one line; raises `LineDown` if it is gone."""

    def close(self, linger_s: float) -> None:
        """Closes all lines."""


class Transport(Protocol):
    """Carries wire messages. Dialing before anybody listens works: what is sent waits."""

    def listen(
        self, address: str, on_message: Callable[[bytes, bytes], None], on_writable: Callable[[], None]
    ) -> Listener:
        """Listens at `address`; `on_message(line, data)` is called for each wire message."""

    def dial(self, address: str, on_message: Callable[[bytes], None], on_writable: Callable[[], None]) -> Dialer:
        """Opens a line to `address`."""

    def drain(self) -> None:
        """Delivers what has already arrived, so that a late loop does not take it for silence."""

    async def close(self) -> None:
        """Frees what is shared by all lines, after they are closed."""


class Traffic:
    """Counts what has crossed all lines of one replica."""

    def __init__(self) -> None:
        self.num_sent = 0  # wire messages
        self.num_received = 0
        self.num_bytes_sent = 0
        self.num_faults = 0  # wire messages that were not ours


class Outbox:
    """Frames on their way to one peer: gathered within a turn of the loop, sent as one message.

    What the transport does not take waits here; whoever puts frames in checks `num_bytes` against
    its bound. `on_down` is called when the line turns out to be gone.
    """

    def __init__(
        self,
        send: Callable[[bytearray], bool],
        *,
        loop: asyncio.AbstractEventLoop,
        traffic: Traffic,
        on_down: Callable[[], None] | None = None,
    ) -> None:
        self._send = send
        self._loop = loop
        self._traffic = traffic
        self._on_down = on_down
        self._batch = Batch()
        self._waiting: deque[bytearray] = deque()
        self._num_waiting_bytes = 0
        self._is_scheduled = False

    @property
    def num_bytes(self) -> int:
        """Bytes not yet taken by the transport."""
        return self._num_waiting_bytes + len(self._batch)

    def put(self, frame: tuple[Any, ...]) -> None:
        """Adds one frame; it leaves at the end of this turn of the loop."""
        self._batch.add(frame)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.flush)
        if len(self._batch) >= BATCH_BYTES:
            self._seal()
            self._send_waiting()

    def flush(self) -> None:
        """Sends what can be sent. A batch stays open to more frames while older ones wait."""
        self._is_scheduled = False
        if not self._waiting and self._batch.num_frames:
            self._seal()
        self._send_waiting()

    def discard(self) -> None:
        """Forgets what has not been sent."""
        self._batch = Batch()
        self._waiting.clear()
        self._num_waiting_bytes = 0

    def _seal(self) -> None:
        data = self._batch.seal()
        self._batch = Batch()
        self._waiting.append(data)
        self._num_waiting_bytes += len(data)

    def _send_waiting(self) -> None:
        while self._waiting:
            data = self._waiting[0]
            try:
                if not self._send(data):
                    return
            except LineDown:
                self.discard()
                if self._on_down is not None:
                    self._on_down()
                return
            self._waiting.popleft()
            self._num_waiting_bytes -= len(data)
            self._traffic.num_sent += 1
            self._traffic.num_bytes_sent += len(data)
            if not self._waiting and self._batch.num_frames and not self._is_scheduled:
                self._seal()
