"""The caller's end of one line: all calls from here to one start of one peer."""

from __future__ import annotations

import asyncio
from typing import Any

from graph.component import Peer
from graph.errors import LinkError, PeerLost, ProtocolFault
from graph.link.calls import OpenCall
from graph.link.codec import LINE, MALFORMED, Bye, Frame, Hello, Kind, decode_batch, decoder, fault
from graph.link.wire import LINGER_S, Dialer, Outbox, Traffic, Transport

_bye = decoder(Bye)


class Line:
    """All calls from here to one start of one peer."""

    def __init__(self, peer: Peer, hello: Hello, *, loop: asyncio.AbstractEventLoop, traffic: Traffic) -> None:
        self.peer = peer
        self.loop = loop
        self.outbox = Outbox(self._send, loop=loop, traffic=traffic)
        self.gone: LinkError | None = None  # why nobody will answer here any more
        self._dialer: Dialer | None = None
        self._hello = hello
        self._traffic = traffic
        self._calls: dict[int, OpenCall] = {}
        self._num_calls = 0

    def dial(self, transport: Transport) -> None:
        """Opens the line; hello is the first thing on it."""
        self._dialer = transport.dial(self.peer.address, self.receive, self.outbox.flush)
        self.outbox.put((LINE, Kind.HELLO, self._hello))

    def next_number(self) -> int:
        """A stream number that this line has not used."""
        self._num_calls += 1
        return self._num_calls

    def start(self, number: int, call: OpenCall, port: str, request: Any) -> None:
        """Sends the request of a new call."""
        self.outbox.put((number, Kind.REQUEST, request, port))
        self._calls[number] = call

    def release(self, number: int, *, tell: bool) -> None:
        """Forgets a call that is closed."""
        if self._calls.pop(number, None) is not None and tell and self.gone is None:
            self.outbox.put((number, Kind.CANCEL, None))

    def receive(self, data: bytes) -> None:
        """Handles one wire message of the peer."""
        self._traffic.num_received += 1
        try:
            frames = decode_batch(data)
        except ProtocolFault as error:
            self._traffic.num_faults += 1
            self.fail(error)
            return
        now = self.loop.time()
        calls = self._calls
        for frame in frames:
            call = calls.get(frame.stream)
            if call is not None:
                call.receive(frame, now)
            elif frame.stream == LINE and frame.kind == Kind.BYE:
                self._take_bye(frame)

    def fail(self, error: LinkError, *, tell: bool = True) -> None:
        """Gives up all calls."""
        for call in list(self._calls.values()):
            call.give_up(error, tell=tell)

    def close(self, error: LinkError) -> None:
        """Gives up all calls and closes the line; says bye, in case the peer is alive after all."""
        self.fail(error, tell=False)
        self.gone = error
        self.outbox.put((LINE, Kind.BYE, None))
        self.outbox.flush()
        self.outbox.discard()
        if self._dialer is not None:
            self._dialer.close(LINGER_S)

    def _send(self, data: bytearray) -> bool:
        return self._dialer is not None and self._dialer.send(data)

    def _take_bye(self, frame: Frame) -> None:
        try:
            bye: Bye = _bye(frame.payload)
            error = bye.failure.error()
        except MALFORMED as malformed:
            self.fail(fault(malformed))
            return
        if bye.is_leaving and self.peer.boot:
            self.gone = error if isinstance(error, PeerLost) else PeerLost(f"{self.peer.id} has stopped")
            self.fail(error, tell=False)
        else:
            self.outbox.put((LINE, Kind.HELLO, self._hello))
            self.fail(error)
