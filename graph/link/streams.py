"""One stream, from the server's side, and the caller's line it runs on.

Life of a stream:

    open        its request arrived, was within `max_streams`, and went to the port's handler
    ended       by `end`, by `fail`, or by an exception of the handler
    cancelled   the caller cancelled, said bye, was replaced by a new start of itself, was declared
                dead by the registry, fell too far behind, or this replica stops

The last two are closed; whatever the handler does to a closed stream is a no-op, and frames that
arrive for one are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from graph.component import Handler
from graph.errors import Failure, LinkError, Overloaded
from graph.link.codec import LINE, NIL, Bye, Decode, Hello, Kind
from graph.link.wire import Outbox

log = logging.getLogger(__name__)

_NIL = msgspec.Raw(NIL)


class Served:
    """One served port: who handles its requests, and how many are open."""

    def __init__(self, name: str, decode: Decode, handler: Handler, max_streams: int) -> None:
        self.name = name
        self.decode = decode
        self.handler = handler
        self.max_streams = max_streams
        self.num_streams = 0


class Caller:
    """One line that said hello, and its open streams."""

    def __init__(self, hello: Hello, outbox: Outbox, max_bytes: int) -> None:
        self.id = hello.id
        self.boot = hello.boot
        self.outbox = outbox
        self.streams: dict[int, ServerStream] = {}
        self._max_bytes = max_bytes

    def put(self, frame: tuple[Any, ...]) -> None:
        """Sends one frame; a caller that is too far behind loses all its streams instead."""
        self.outbox.put(frame)
        if self.outbox.num_bytes > self._max_bytes:
            behind = f"{self.id} is {self.outbox.num_bytes} bytes behind; its streams were given up"
            self.cut(Overloaded(behind, retry_after_s=1.0))

    def cut(self, error: LinkError, *, is_leaving: bool = False) -> None:
        """Ends every stream of this line, and tells the caller."""
        self.outbox.discard()
        self.cancel()
        self.outbox.put((LINE, Kind.BYE, Bye(Failure.of(error), is_leaving)))

    def cancel(self) -> None:
        """Cancels every stream of this line without a word to the caller."""
        for stream in list(self.streams.values()):
            stream.cancel()


class ServerStream:
    """Implements `graph.component.Stream`."""

    __slots__ = ("_caller", "_is_cancelled", "_number", "_on_cancel", "_served", "id", "is_closed")

    def __init__(self, id: str, number: int, caller: Caller, served: Served) -> None:
        self.id = id
        self.is_closed = False
        self._is_cancelled = False
        self._number = number
        self._caller = caller
        self._served = served
        self._on_cancel: list[Callable[[], None]] = []

    @property
    def peer(self) -> str:
        """The caller's replica id."""
        return self._caller.id

    @property
    def num_backlog_bytes(self) -> int:
        """What waits for this stream's caller, of all its streams."""
        return self._caller.outbox.num_bytes

    def send(self, item: Any) -> None:
        """Sends one reply."""
        if not self.is_closed:
            self._caller.put((self._number, Kind.ITEM, item))

    def end(self, item: Any = None) -> None:
        """Ends the stream well, with an optional last reply."""
        self._close(Kind.END, _NIL if item is None else item)

    def fail(self, error: LinkError) -> None:
        """Ends the stream with an error."""
        self._close(Kind.FAILURE, Failure.of(error))

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Calls back if the stream is cancelled; at once if it has been already."""
        if self._is_cancelled:
            callback()
        elif not self.is_closed:
            self._on_cancel.append(callback)

    def cancel(self) -> None:
        """Closes the stream on behalf of its caller."""
        if self.is_closed:
            return
        self._is_cancelled = True
        callbacks, self._on_cancel = self._on_cancel, []
        self._forget()
        for callback in callbacks:
            try:
                callback()
            except Exception:
                log.exception("a cancel callback at %r failed", self._served.name)

    def _close(self, kind: Kind, payload: Any) -> None:
        if self.is_closed:
            return
        self._forget()
        self._on_cancel = []
        self._caller.put((self._number, kind, payload))

    def _forget(self) -> None:
        self.is_closed = True
        self._served.num_streams -= 1
        del self._caller.streams[self._number]
