"""All links of one replica process: what it serves, calls, publishes and follows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from graph.component import Client, Handler, Peer, Publisher, Subscription
from graph.errors import DeclarationError
from graph.link.client import Pool, PortClient
from graph.link.codec import decoder
from graph.link.events import PortPublisher, PortSubscriber
from graph.link.server import Server
from graph.link.streams import Served
from graph.link.wire import LINGER_S, Limits, LineDown, Listener, Traffic, Transport
from graph.ports import Calls, Message, Publishes, Serves, Subscribes


class Links:
    """Everything one replica sends and receives. Made on, and belongs to, the running event loop."""

    def __init__(
        self, id: str, boot: str, *, transport: Transport, listen: str | None = None, limits: Limits | None = None
    ) -> None:
        limits = limits or Limits()
        loop = asyncio.get_running_loop()
        self.traffic = Traffic()
        self._id = id
        self._transport = transport
        self._limits = limits
        self._loop = loop
        self._live: dict[str, Peer] = {}
        self._pool = Pool(id, boot, transport=transport, loop=loop, traffic=self.traffic, limits=limits)
        self._server = Server(
            id, boot, send=self._send, loop=loop, traffic=self.traffic, max_bytes=limits.backlog_bytes
        )
        self._clients: list[PortClient] = []
        self._publishers: list[PortPublisher] = []
        self._subscribers: list[PortSubscriber] = []
        self._is_closed = False
        self._listener: Listener | None = None
        if listen is not None:
            self._listener = transport.listen(listen, self._server.receive, self._server.flush)

    @property
    def address(self) -> str:
        """Where others reach this replica."""
        if self._listener is None:
            raise DeclarationError(f"the links of {self._id} listen nowhere; pass listen=")
        return self._listener.address

    def serve(self, port: Serves, handler: Handler, *, max_streams: int = 100_000) -> None:
        """Answers the requests that arrive at `port`."""
        self._server.serve(Served(port.name, decoder(*port.requests), handler, max_streams))

    def client(self, port: Calls, targets: Mapping[str, str]) -> Client:
        """The client of `port`; `targets` maps each linked node to the name of its port."""
        client = PortClient(self._pool, port, targets)
        self._clients.append(client)
        return client

    def publisher(self, port: Publishes, snapshot: Callable[[], Message]) -> Publisher:
        """The publisher of `port`."""
        publisher = PortPublisher(port, snapshot, loop=self._loop, limits=self._limits)
        self._server.serve(publisher.served)
        self._publishers.append(publisher)
        return publisher

    def subscribe(self, port: Subscribes, subscription: Subscription, targets: Mapping[str, str]) -> None:
        """Follows `port` at every live peer of the nodes in `targets`."""
        self._subscribers.append(PortSubscriber(self._pool, port, subscription, targets))

    def set_peers(self, live: Iterable[Peer]) -> None:
        """Takes the registry's word on who is alive, this replica included or not."""
        before, self._live = self._live, {peer.id: peer for peer in live}
        self._pool.set_peers(self._live)
        for peer in before.values():
            if peer.id not in self._live or self._live[peer.id].boot != peer.boot:
                self._server.forget(peer.id, peer.boot)
        for subscriber in self._subscribers:
            subscriber.refresh()
        for client in self._clients:
            client.refresh()

    async def close(self) -> None:
        """Ends every call and stream, then closes the sockets. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for subscriber in self._subscribers:
            subscriber.close()
        for publisher in self._publishers:
            publisher.close()
        self._pool.close()
        await self._server.close()
        if self._listener is not None:
            self._listener.close(LINGER_S)
        await self._transport.close()
        await asyncio.sleep(0)  # the last ends are delivered in the next turn

    def _send(self, line: bytes, data: bytearray) -> bool:
        if self._listener is None:
            raise LineDown
        return self._listener.send(line, data)
