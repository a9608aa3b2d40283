"""A `Context` without processes: clients whose peers are plain handlers in this process."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from graph import Health, LinkError, NoPeer, Peer, PeerFault, PeerLost

_ids = itertools.count(1)


class FakeCall:
    """Both halves of one request: the caller's `Call` and the server's `Stream`."""

    def __init__(self, client: FakeClient, peer: Peer, request: Any, on_item: Any, on_end: Any) -> None:
        self._client = client
        self._peer = peer
        self.request = request
        self._on_item = on_item
        self._on_end = on_end
        self.stream = FakeStream(self)
        self.was_cancelled = False

    @property
    def peer(self) -> Peer:
        return self._peer

    def cancel(self) -> None:
        if self.stream.is_closed:
            return
        self.was_cancelled = True
        self._close()
        self.stream.run_cancel_callbacks()

    def lose(self, error: LinkError) -> None:
        """The peer died: both sides learn of it."""
        if self.stream.is_closed:
            return
        self._close()
        self.stream.run_cancel_callbacks()
        self.deliver_end(error)

    def deliver(self, item: Any) -> None:
        asyncio.get_running_loop().call_soon(self._deliver, item)

    def deliver_end(self, error: LinkError | None) -> None:
        asyncio.get_running_loop().call_soon(self._on_end, error)

    def _deliver(self, item: Any) -> None:
        if not self.was_cancelled:
            self._on_item(item)

    def _close(self) -> None:
        self.stream.is_closed = True
        self._client.calls.discard(self)

    def closed_by_server(self) -> None:
        self._client.calls.discard(self)


class FakeStream:
    """The server's half."""

    def __init__(self, call: FakeCall) -> None:
        self._call = call
        self.id = f"stream-{next(_ids)}"
        self.peer = "frontend/0"
        self.is_closed = False
        self._callbacks: list[Callable[[], None]] = []

    def send(self, item: Any) -> None:
        if not self.is_closed:
            self._call.deliver(item)

    def end(self, item: Any = None) -> None:
        if self.is_closed:
            return
        if item is not None:
            self._call.deliver(item)
        self.is_closed = True
        self._call.closed_by_server()
        self._call.deliver_end(None)

    def fail(self, error: LinkError) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._call.closed_by_server()
        self._call.deliver_end(error)

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def run_cancel_callbacks(self) -> None:
        for callback in self._callbacks:
            callback()


class FakeClient:
    """A client whose peers are handlers; `serve` adds one, `kill` takes it away as a crash would."""

    def __init__(self, *, is_linked: bool = True) -> None:
        self.is_linked = is_linked
        self.peers: dict[str, Peer] = {}
        self.calls: set[FakeCall] = set()
        self.opened: list[tuple[str, Any]] = []
        self._handlers: dict[str, Callable[[Any, Any], Any]] = {}
        self._callbacks: list[Callable[[Mapping[str, Peer]], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, peer: str, handler: Callable[[Any, Any], Any], **facts: int) -> None:
        self._handlers[peer] = handler
        self.peers[peer] = Peer(peer, f"boot-{next(_ids)}", "fake://", facts=facts)
        self._changed()

    def kill(self, peer: str) -> None:
        self.remove(peer)
        for call in [call for call in self.calls if call.peer.id == peer]:
            call.lose(PeerLost(f"{peer} died"))

    def remove(self, peer: str) -> None:
        del self.peers[peer]
        self._changed()

    def on_change(self, callback: Callable[[Mapping[str, Peer]], None]) -> None:
        self._callbacks.append(callback)
        callback(self.peers)

    async def wait_peer(self, timeout_s: float) -> Peer:
        if not self.peers:
            raise NoPeer("no peer")
        return next(iter(self.peers.values()))

    def open(self, request: Any, *, peer: str, timeout_s: float, on_item: Any = None, on_end: Any = None) -> FakeCall:
        if peer not in self.peers:
            raise NoPeer(f"{peer} is not known")
        self.opened.append((peer, request))
        call = FakeCall(self, self.peers[peer], request, on_item, on_end)
        self.calls.add(call)
        result = self._handlers[peer](request, call.stream)
        if asyncio.iscoroutine(result):
            task = asyncio.get_running_loop().create_task(self._watched(result, call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return call

    async def _watched(self, handling: Any, call: FakeCall) -> None:
        try:
            await handling
        except LinkError as error:
            call.stream.fail(error)
        except Exception as error:
            call.stream.fail(PeerFault(repr(error)))

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback(self.peers)


class FakeContext:
    """The part of `Context` that the text side uses."""

    def __init__(self, *, listener: socket.socket | None = None, **clients: FakeClient) -> None:
        self.id = "test/0"
        self.boot = "boot"
        self.graph = "test"
        self.num_cores = 1
        self.listener = listener
        self.metrics = CollectorRegistry()
        self.clients = clients
        self.handlers: dict[str, Callable[[Any, Any], Any]] = {}
        self.state = Health("ready", (), {"processor": 1})
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def client(self, port: Any) -> FakeClient:
        return self.clients.setdefault(port.name, FakeClient(is_linked=False))

    def serve(self, port: Any, handler: Callable[[Any, Any], Any], *, max_streams: int = 100_000) -> None:
        self.handlers[port.name] = handler

    def progress(self, doing: str, fraction: float | None = None) -> None:
        pass

    def spawn(self, work: Any, *, name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.add(task)
        return task

    def health(self) -> Health:
        return self.state

    async def collect_metrics(self, timeout_s: float) -> bytes:
        return b"# no metrics\n"

    def cancel_tasks(self) -> None:
        for task in self.tasks:
            task.cancel()


def listening_socket() -> socket.socket:
    """A bound TCP socket on a free loopback port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    listener.setblocking(False)
    return listener


async def until(condition: Callable[[], bool], timeout_s: float = 2.0) -> None:
    """Waits for what has no event of its own."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
