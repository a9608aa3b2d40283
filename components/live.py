"""What a worker has under way, by request id: each with the stream it is answered on, until its one end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from components.engine.outputs import Ended
from graph import Refused, Stream


class Streamed(Protocol):
    """What is known of one request, its stream among it."""

    @property
    def stream(self) -> Stream:
        """Where its answer goes."""


Item = TypeVar("Item", bound=Streamed)


class Live(Generic[Item]):
    """The live requests of one worker. Event loop's thread only."""

    def __init__(self, kind: str) -> None:
        """`kind` names a request in refusals: "request", "prefill"."""
        self._kind = kind
        self._items: dict[str, Item] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    def __getitem__(self, id: str) -> Item:
        return self._items[id]

    def get(self, id: str) -> Item | None:
        """What is known of a request; None if it is not live, or not any more."""
        return self._items.get(id)

    def check_new(self, id: str) -> None:
        """Raises `Refused` for an id that is live already."""
        if id in self._items:
            raise Refused(f"{self._kind} {id} is already running here", code="duplicate_request")

    def add(self, id: str, item: Item) -> None:
        """A request begins; raises `Refused` as `check_new` does."""
        self.check_new(id)
        self._items[id] = item
        self._idle.clear()

    def remove(self, id: str) -> Item:
        """A request is over, and its stream closed."""
        item = self._items.pop(id)
        if not self._items:
            self._idle.set()
        return item

    def fail(self, output: Ended) -> Item:
        """The engine ended a request without finishing it: its stream ends in the reason."""
        item = self.remove(output.id)
        item.stream.fail(output.error)
        return item

    async def drained(self) -> None:
        """Returns when nothing is live any more."""
        await self._idle.wait()
