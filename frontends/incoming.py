"""What a processor has sent of a reply, and nobody has written yet."""

from __future__ import annotations

import asyncio

from frontends.messages import HttpBody, HttpHead
from graph import LinkError


class Reply:
    """Collects what a processor sends until the exchange writes it; made anew for every attempt.

    The trails of all attempts gather in `trail`, at once, for their bytes will be written.
    """

    def __init__(self, wake: asyncio.Event, trail: bytearray) -> None:
        self._wake = wake
        self.trail = trail
        self.num_pieces = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self.head: HttpHead | None = None
        self.error: LinkError | None = None
        self.has_ended = False

    def on_item(self, item: HttpHead | HttpBody) -> None:
        """Called by the link. An empty body is the processor's sign of life."""
        if isinstance(item, HttpHead):
            self.head = item
        elif item.data:
            self._pieces.append(item.data)
            self._size += len(item.data)
            self.num_pieces += 1
            self.trail += item.trail
            self._wake.set()

    def on_end(self, error: LinkError | None) -> None:
        """Called by the link, once."""
        self.error = error
        self.has_ended = True
        self._wake.set()

    @property
    def backlog_bytes(self) -> int:
        """Bytes that nobody has taken yet."""
        return self._size

    def take(self) -> bytes:
        """All bytes that have come since the last call."""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        return data
