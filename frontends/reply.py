"""The processor's half of one HTTP exchange.

unanswered   nothing was sent; an error still becomes a plain HTTP reply
streaming    the head and the first events are out, perhaps another processor's; an error becomes the last event
ended        complete, failed, or the client left
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from frontends.messages import HttpBody, HttpHead
from frontends.text.errors import ApiError
from graph import Stream

_EVENT_HEAD = HttpHead(
    200,
    (
        ("content-type", "text/event-stream"),
        ("cache-control", "no-cache"),
        ("x-accel-buffering", "no"),
    ),
)
_SIGN_OF_LIFE = HttpBody(b"")
_PING = HttpBody(b": ping\n\n")


class HttpReply:
    """Sends one reply over the stream of its request; `clock` tells monotonic seconds."""

    def __init__(self, stream: Stream, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._sent_at = clock()
        self.is_streaming = False

    @property
    def is_closed(self) -> bool:
        """Whether nobody listens any more."""
        return self._stream.is_closed

    def whole(self, status: int, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """A complete JSON reply."""
        length = ("content-length", str(len(body)))
        self._stream.send(HttpHead(status, (("content-type", "application/json"), length, *headers)))
        self._stream.end(HttpBody(body))

    def json(self, value: Any) -> None:
        """A complete reply of status 200."""
        self.whole(200, msgspec.json.encode(value))

    def take_over(self) -> None:
        """Another processor began to stream this reply, and was lost."""
        self.is_streaming = True

    def events(self, data: bytes, trail: bytes = b"") -> None:
        """Some finished server-sent events, with their trail; the first ones bring the head."""
        if not self.is_streaming:
            self.is_streaming = True
            self._stream.send(_EVENT_HEAD)
        self._sent_at = self._clock()
        self._stream.send(HttpBody(data, trail))

    def end(self) -> None:
        """Ends a stream of events well."""
        self._stream.end()

    def fail(self, error: ApiError, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Ends in an error, in the form that this moment allows."""
        if self.is_streaming:
            self._stream.end(HttpBody(b"data: " + error.body() + b"\n\n"))
            return
        if error.retry_after_s is not None:
            headers = (*headers, ("retry-after", str(max(1, round(error.retry_after_s)))))
        self.whole(error.status, error.body(), headers)

    def reassure(self, silence_s: float) -> None:
        """Called now and then: after `silence_s` without a word, tells ingress and client that all is well."""
        if self._clock() - self._sent_at >= silence_s:
            self._sent_at = self._clock()
            self._stream.send(_PING if self.is_streaming else _SIGN_OF_LIFE)
