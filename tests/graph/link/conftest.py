"""Builders of linked replicas, on each transport."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graph import Message
from graph.component import Peer
from graph.link import InProcess, Limits, Links, ZeroMQ
from graph.ports import Calls, Publishes, Serves, Subscribes


class Ask(Message, frozen=True):
    """A request of the tests."""

    number: int = 0
    body: bytes = b""


class Tell(Message, frozen=True):
    """A reply, or an event, of the tests."""

    number: int
    body: bytes = b""


class State(Message, frozen=True):
    """A snapshot of the tests: all events so far."""

    numbers: list[int]


class Ports:
    """The ports that the tests link."""

    asks = Calls(Ask, Tell)
    answers = Serves(Ask, Tell)
    wrong_asks = Calls(Tell, Ask)
    news = Publishes(Tell, State)
    follows = Subscribes(Tell, State)


class Site:
    """Makes linked replicas on one transport, runs a test among them, and closes them all."""

    Ask, Tell, State, Ports = Ask, Tell, State, Ports

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self._shared: InProcess | None = None
        self._made: list[Links] = []

    def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Runs the test's coroutine; every replica it made is closed at the end."""

        async def main() -> None:
            self._shared = InProcess()
            try:
                await asyncio.wait_for(body(), 20)
            finally:
                for links in reversed(self._made):
                    await links.close()

        asyncio.run(main())

    def address(self, name: str) -> str:
        """An address of this transport."""
        return {"inprocess": name, "ipc": f"ipc://{self._folder}/{name}", "tcp": "tcp://127.0.0.1:0"}[self.kind]

    def links(self, id: str, *, boot: str = "1", listen: str | None = None, limits: Limits | None = None) -> Links:
        """One replica's links."""
        transport: Any = self._shared if self.kind == "inprocess" else ZeroMQ()
        links = Links(id, boot, transport=transport, listen=listen, limits=limits)
        self._made.append(links)
        return links

    def server(self, handler: Any = None, *, boot: str = "1", max_streams: int = 100_000, **more: Any) -> Links:
        """`server/0`, with `handler` at its port."""
        links = self.links("server/0", boot=boot, listen=self.address("server"), **more)
        if handler is not None:
            links.serve(Ports.answers, handler, max_streams=max_streams)
        return links

    def caller(self, *servers: Links, id: str = "caller/0", boot: str = "1", **more: Any) -> tuple[Links, Any]:
        """`caller/0`, told of the servers, and its client."""
        links = self.links(id, boot=boot, **more)
        client = links.client(Ports.asks, {"server": "answers"})
        links.set_peers([self.peer(server) for server in servers])
        return links, client

    def peer(self, links: Links, *, boot: str = "1", state: str = "ready") -> Peer:
        """What the registry says of a server."""
        return Peer("server/0", boot, links.address, state)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="link") as path:
        yield Path(path)


@pytest.fixture(params=["inprocess", "ipc", "tcp"])
def site(request: pytest.FixtureRequest, folder: Path) -> Site:
    """Each transport in turn."""
    return Site(request.param, folder)


@pytest.fixture
def ipc(folder: Path) -> Site:
    """ZeroMQ over ipc alone."""
    return Site("ipc", folder)


class Ending:
    """Records what a pushed call delivers."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.ends: list[Any] = []
        self._done = asyncio.Event()

    def on_item(self, item: Any) -> None:
        self.items.append(item)

    def on_end(self, error: Any) -> None:
        self.ends.append(error)
        self._done.set()

    async def wait(self) -> Any:
        """The end: None or the error."""
        await self._done.wait()
        return self.ends[0]


@pytest.fixture
def ending() -> type[Ending]:
    """The recorder's class, to be made inside the running loop."""
    return Ending


async def until(condition: Callable[[], Any]) -> None:
    """Waits until `condition()` holds; the test's own time limit bounds it."""
    while not condition():  # noqa: ASYNC110 - what it waits for happens in a callback of the product
        await asyncio.sleep(0.002)


@pytest.fixture(name="until")
def until_fixture() -> Callable[[Callable[[], Any]], Awaitable[None]]:
    """The waiting function."""
    return until
