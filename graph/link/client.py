"""The caller's half of the links: one line per peer, shared by all ports that call it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from graph.component import Peer
from graph.errors import LinkError, NoPeer, Overloaded, PeerLost, ProtocolFault
from graph.link.calls import Inbox, OnEnd, OnItem, OpenCall
from graph.link.codec import Decode, Hello, decoder
from graph.link.deadlines import Deadlines
from graph.link.line import Line
from graph.link.wire import Limits, Traffic, Transport
from graph.ports import Calls, Message

log = logging.getLogger(__name__)


class Pool:
    """The lines of one replica, and the registry's word on who is at their other ends."""

    def __init__(
        self,
        id: str,
        boot: str,
        *,
        transport: Transport,
        loop: asyncio.AbstractEventLoop,
        traffic: Traffic,
        limits: Limits,
    ) -> None:
        self.id = id
        self.loop = loop
        self.live: Mapping[str, Peer] = {}
        self._boot = boot
        self._transport = transport
        self._traffic = traffic
        self._limits = limits
        self._lines: dict[str, Line] = {}
        self._deadlines = Deadlines(loop, transport.drain)

    def set_peers(self, live: Mapping[str, Peer]) -> None:
        """Fails the calls to all starts of peers that are not in `live`."""
        self.live = live
        for id, line in list(self._lines.items()):
            peer = live.get(id)
            if peer is None or (peer.boot, peer.address) != (line.peer.boot, line.peer.address):
                del self._lines[id]
                what = "is gone" if peer is None else "was restarted"
                line.close(PeerLost(f"{id} {what}"))
            else:
                line.peer = peer

    def open(
        self,
        peer: Peer,
        port: str,
        request: Any,
        *,
        edge: str,
        decode: Decode,
        timeout_s: float,
        on_item: OnItem | None,
        on_end: OnEnd | None,
    ) -> OpenCall:
        """Starts a call; every fault after this arrives as its end."""
        line = self._line(peer)
        inbox = None
        if on_item is None and on_end is None:
            inbox = Inbox(self._limits.inbox_items, self._limits.inbox_bytes)
            on_item, on_end = inbox.put, inbox.end
        if on_item is None or on_end is None:
            raise TypeError("on_item and on_end are given both or neither")
        number = line.next_number()
        call = OpenCall(
            line, number, edge=edge, decode=decode, timeout_s=timeout_s, on_item=on_item, on_end=on_end, inbox=inbox
        )
        if line.gone is not None:
            call.give_up(line.gone)
        elif line.outbox.num_bytes > self._limits.backlog_bytes:
            behind = f"{edge}: {peer.id} is {line.outbox.num_bytes} bytes behind"
            call.give_up(Overloaded(behind, retry_after_s=1.0))
        else:
            line.start(number, call, port, request)
            self._deadlines.add(call)
        return call

    def close(self) -> None:
        """Cancels all calls, says bye, closes all lines."""
        for line in self._lines.values():
            line.close(PeerLost(f"{self.id} is stopping"))
        self._lines.clear()
        self.live = {}
        self._deadlines.close()

    def _line(self, peer: Peer) -> Line:
        line = self._lines.get(peer.id)
        if line is None:
            hello = Hello(self.id, self._boot, peer.boot)
            line = self._lines[peer.id] = Line(peer, hello, loop=self.loop, traffic=self._traffic)
            line.dial(self._transport)
        return line


class PortClient:
    """Implements `graph.component.Client` for one `Calls` port."""

    def __init__(self, pool: Pool, port: Calls, targets: Mapping[str, str]) -> None:
        self._pool = pool
        self._targets = dict(targets)
        self._edge = f"{pool.id}.{port.name} >> {', '.join(targets) or 'nothing'}"
        self._edges = {node: f"{pool.id}.{port.name} >> {node}.{name}" for node, name in targets.items()}
        self._decode = decoder(*port.replies)
        self._peers: Mapping[str, Peer] = MappingProxyType({})
        self._callbacks: list[Callable[[Mapping[str, Peer]], None]] = []
        self._waiters: set[asyncio.Future[Peer]] = set()
        self.refresh()

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The ready replicas at the other end, by id."""
        return self._peers

    @property
    def is_linked(self) -> bool:
        """Whether the graph links this port at all."""
        return bool(self._targets)

    def refresh(self) -> None:
        """Takes the ready peers anew from the pool."""
        peers = {p.id: p for p in self._pool.live.values() if p.node in self._targets and p.state == "ready"}
        if peers == self._peers:
            return
        self._peers = MappingProxyType(peers)
        for waiter in self._waiters:
            if peers and not waiter.done():
                waiter.set_result(next(iter(peers.values())))
        for callback in self._callbacks:
            try:
                callback(self._peers)
            except Exception:
                log.exception("%s: the receiver of the peers failed", self._edge)

    async def wait_peer(self, timeout_s: float) -> Peer:
        """The first peer that is ready; raises `NoPeer` if there is none in time."""
        for peer in self._peers.values():
            return peer
        waiter: asyncio.Future[Peer] = self._pool.loop.create_future()
        self._waiters.add(waiter)
        try:
            return await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError:
            raise NoPeer(f"{self._edge}: no ready replica within {timeout_s:g} s", retry_after_s=1.0) from None
        finally:
            self._waiters.discard(waiter)

    def open(
        self,
        request: Message,
        *,
        peer: str,
        timeout_s: float,
        on_item: OnItem | None = None,
        on_end: OnEnd | None = None,
    ) -> OpenCall:
        """Starts a request; see `Client.open`."""
        found = self._pool.live.get(peer)
        port = None if found is None else self._targets.get(found.node)
        if found is None or port is None:
            raise NoPeer(f"{self._edge}: no live replica {peer!r}", retry_after_s=1.0)
        return self._pool.open(
            found,
            port,
            request,
            edge=self._edges[found.node],
            decode=self._decode,
            timeout_s=timeout_s,
            on_item=on_item,
            on_end=on_end,
        )

    async def call(self, request: Message, *, peer: str, timeout_s: float) -> Any:
        """Sends a request that has exactly one reply, and returns it."""
        reply: asyncio.Future[Any] = self._pool.loop.create_future()
        items: list[Any] = []

        def on_end(error: LinkError | None) -> None:
            if reply.done():
                return
            if error is None and len(items) != 1:
                error = ProtocolFault(f"{call.edge}: {peer} sent {len(items)} replies where one is due")
            if error is None:
                reply.set_result(items[0])
            else:
                reply.set_exception(error)

        call = self.open(request, peer=peer, timeout_s=timeout_s, on_item=items.append, on_end=on_end)
        try:
            return await reply
        finally:
            call.cancel()

    def on_change(self, callback: Callable[[Mapping[str, Peer]], None]) -> None:
        """Calls back now and whenever the set of ready peers changes."""
        self._callbacks.append(callback)
        callback(self._peers)
