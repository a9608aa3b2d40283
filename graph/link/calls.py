"""One call, from the caller's side.

Life of a call:

    open        its request is on the way; each reply moves its deadline
    ended       the good end, or the server's failure, arrived
    given up    cancelled, late, overfull, or its peer is lost; the server is told if that can help

It ends exactly once. Ends that come from here, not from the wire, are delivered in the next turn of the
loop, so that no caller is called back from within its own `open` or `cancel`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from graph.component import Peer
from graph.errors import DeadlineExceeded, Failure, LinkError, Overloaded, ProtocolFault, RequestCancelled
from graph.link.codec import MALFORMED, NIL, Decode, Frame, Kind, decoder, fault

log = logging.getLogger(__name__)

_failure = decoder(Failure)

OnItem = Callable[[Any], None]
OnEnd = Callable[[LinkError | None], None]


class CallLine(Protocol):
    """What a call needs of the line it runs on."""

    @property
    def peer(self) -> Peer: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def release(self, number: int, *, tell: bool) -> None:
        """The call is closed; with `tell` the server must hear of it."""


class OpenCall:
    """Implements `graph.component.Call`; `Timed` for the deadlines."""

    __slots__ = (
        "_inbox",
        "_line",
        "_number",
        "_on_end",
        "deadline",
        "decode",
        "edge",
        "is_closed",
        "on_item",
        "timeout_s",
    )

    def __init__(
        self,
        line: CallLine,
        number: int,
        *,
        edge: str,
        decode: Decode,
        timeout_s: float,
        on_item: OnItem,
        on_end: OnEnd,
        inbox: Inbox | None,
    ) -> None:
        self.edge = edge
        self.decode = decode
        self.timeout_s = timeout_s
        self.deadline = line.loop.time() + timeout_s
        self.is_closed = False
        self.on_item = on_item
        self._on_end = on_end
        self._inbox = inbox
        self._line = line
        self._number = number

    @property
    def peer(self) -> Peer:
        """The replica that was asked."""
        return self._line.peer

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._inbox is None:
            raise TypeError("this call pushes its replies to on_item; it cannot be iterated")
        return self._inbox

    def cancel(self) -> None:
        """Gives the call up. Idempotent."""
        if not self.is_closed:
            self.give_up(RequestCancelled(f"{self.edge} to {self.peer.id}: cancelled by the caller"))

    def expire(self) -> None:
        """Gives the call up because its next reply is late."""
        self.give_up(DeadlineExceeded(f"{self.edge}: no answer from {self.peer.id} within {self.timeout_s:g} s"))

    def give_up(self, error: LinkError, *, tell: bool = True) -> None:
        """Ends the call from this side."""
        if self.is_closed:
            return
        self.is_closed = True
        self._line.release(self._number, tell=tell)
        self._line.loop.call_soon(self._report, error)

    def receive(self, frame: Frame, now: float) -> None:
        """Handles one frame of this call."""
        self.deadline = now + self.timeout_s
        if frame.kind == Kind.ITEM:
            self._deliver(frame.payload)
        elif frame.kind == Kind.END:
            if memoryview(frame.payload) != NIL:
                self._deliver(frame.payload)
            self._end(None)
        elif frame.kind == Kind.FAILURE:
            try:
                self._end(_failure(frame.payload).error())
            except MALFORMED as malformed:
                self.give_up(fault(malformed))
        else:
            self.give_up(ProtocolFault(f"{self.edge}: {self.peer.id} sent a frame of unknown kind {frame.kind}"))

    def _deliver(self, payload: Any) -> None:
        try:
            item = self.decode(payload)
        except MALFORMED as malformed:
            self.give_up(fault(malformed))
            return
        if self._inbox is not None and not self._inbox.reserve(memoryview(payload).nbytes):
            self.give_up(Overloaded(f"{self.edge}: the replies of {self.peer.id} are not consumed fast enough"))
            return
        try:
            self.on_item(item)
        except Exception:
            log.exception("%s: the receiver of a reply failed", self.edge)
            self.give_up(RequestCancelled(f"{self.edge}: the receiver of a reply failed"))

    def _end(self, error: LinkError | None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._line.release(self._number, tell=False)
        self._report(error)

    def _report(self, error: LinkError | None) -> None:
        on_end = self._on_end
        self.on_item, self._on_end = _ignore, _ignore
        try:
            on_end(error)
        except Exception:
            log.exception("%s: the receiver of the end failed", self.edge)


def _ignore(_: Any) -> None:
    """Stands in for the callbacks of a closed call, so that it keeps nothing alive."""


class Inbox:
    """The bounded queue of an iterated call."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items: deque[tuple[Any, int]] = deque()
        self._reserved = 0
        self._is_ended = False
        self._error: LinkError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def reserve(self, num_bytes: int) -> bool:
        """Whether one more reply fits; the next `put` is it."""
        self._reserved = num_bytes
        return len(self._items) < self._max_items and self._num_bytes + num_bytes <= self._max_bytes

    def put(self, item: Any) -> None:
        """Adds a reply."""
        self._items.append((item, self._reserved))
        self._num_bytes += self._reserved
        self._wake()

    def end(self, error: LinkError | None) -> None:
        """Marks the end, behind the replies."""
        self._is_ended = True
        self._error = error
        self._wake()

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Any:
        while not self._items:
            if self._is_ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item, num_bytes = self._items.popleft()
        self._num_bytes -= num_bytes
        return item

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
