"""The ZeroMQ transport: one ROUTER for all that a replica serves, one DEALER per peer it calls.

The sockets are driven raw on the event loop. A socket's file descriptor is edge-triggered: it
becomes readable when the socket's mailbox gets a command, and any call on the socket may empty that
mailbox, a send included. So each readiness is followed by reading until nothing is left, and each send
by a look at whether something became readable meanwhile.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from graph.errors import DeclarationError, LaunchError
from graph.link.wire import LineDown

# As plain numbers: looking an option up by its enum costs more than asking for its value.
_EVENTS, _MORE = int(zmq.EVENTS), int(zmq.RCVMORE)
_POLLIN, _NOBLOCK, _SNDMORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.SNDMORE)

_HIGH_WATER = 32  # wire messages per line and direction; beyond it they wait in the outbox, where they merge
_MAX_MESSAGE_BYTES = 256 << 20
_RETRY_S = 0.005
_BURST = 64  # wire messages read before others on the loop get their turn


class ZeroMQ:
    """The sockets of one `Links`, over ipc:// and loopback tcp://."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # made with the first socket
        self._sockets: set[_Socket] = set()

    def listen(
        self, address: str, on_message: Callable[[bytes, bytes], None], on_writable: Callable[[], None]
    ) -> ZeroMQListener:
        """Binds the ROUTER socket."""
        socket = self._socket(zmq.ROUTER, address)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(0)
            if not self._sockets:
                self._end_context()
            raise LaunchError(f"cannot listen at {address}: {error.strerror}") from error
        bound = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

        def deliver(parts: list[bytes]) -> None:
            if len(parts) == 2:
                on_message(parts[0], parts[1])

        return ZeroMQListener(_Socket(socket, deliver, on_writable, self._sockets), bound)

    def dial(self, address: str, on_message: Callable[[bytes], None], on_writable: Callable[[], None]) -> ZeroMQDialer:
        """Connects a DEALER socket; the peer may bind later."""
        socket = self._socket(zmq.DEALER, address)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise DeclarationError(f"link address {address!r} cannot be used: {error.strerror}") from error

        def deliver(parts: list[bytes]) -> None:
            if len(parts) == 1:
                on_message(parts[0])

        return ZeroMQDialer(_Socket(socket, deliver, on_writable, self._sockets))

    def drain(self) -> None:
        """Reads what has already arrived."""
        for socket in list(self._sockets):
            socket.read()

    async def close(self) -> None:
        """Ends the context; waits for lingering sockets, which is bounded."""
        for socket in list(self._sockets):
            socket.close(0)
        await asyncio.to_thread(self._end_context)

    def _end_context(self) -> None:
        if self._context is not None:
            context, self._context = self._context, None
            context.term()

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        _refuse_plain(address)
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        return socket


class ZeroMQListener:
    """A bound ROUTER socket; a line is the routing id that ZeroMQ gave the connection."""

    def __init__(self, socket: _Socket, address: str) -> None:
        self._socket = socket
        self.address = address

    def send(self, line: bytes, data: bytearray) -> bool:
        """Sends to one line."""
        return self._socket.send(data, line)

    def close(self, linger_s: float) -> None:
        """Closes the socket, and removes its file before a successor can make its own."""
        scheme, _, path = self.address.partition("://")
        if scheme == "ipc" and not path.startswith("@"):
            Path(path).unlink(missing_ok=True)
        self._socket.close(linger_s)


class ZeroMQDialer:
    """A connected DEALER socket."""

    def __init__(self, socket: _Socket) -> None:
        self._socket = socket

    def send(self, data: bytearray) -> bool:
        """Sends to the peer."""
        return self._socket.send(data)

    def close(self, linger_s: float) -> None:
        """Closes the socket."""
        self._socket.close(linger_s)


class _Socket:
    """One raw socket on the event loop."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        deliver: Callable[[list[bytes]], None],
        on_writable: Callable[[], None],
        registry: set[_Socket],
    ) -> None:
        self._socket = socket
        self._deliver = deliver
        self._on_writable = on_writable
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_full = False  # a send was refused; writers wait for `on_writable`
        self._is_scheduled = False  # a `read` is on the loop's list
        registry.add(self)
        self._loop.add_reader(self._fd, self.read)
        self._schedule()

    def send(self, data: bytearray, line: bytes | None = None) -> bool:
        """Sends one wire message, on a ROUTER to `line`; False if there is no room."""
        if self._socket.closed:
            raise LineDown
        try:
            if line is not None:
                self._socket.send(line, _NOBLOCK | _SNDMORE)
            self._socket.send(data, _NOBLOCK)
        except zmq.Again:
            self._wait_writable()
            return False
        except zmq.ZMQError as error:
            raise LineDown from error
        finally:
            if not self._is_scheduled and self._is_readable():
                self._schedule()
        return True

    def read(self) -> None:
        """Delivers what has arrived, at most a burst of it; then lets waiting writers try."""
        self._is_scheduled = False
        if self._socket.closed:
            return
        parts = self._receive()  # nearly always there is one: cheaper to try than to ask
        for _ in range(_BURST):
            if parts is None:
                break
            self._deliver(parts)
            parts = None if self._socket.closed or not self._is_readable() else self._receive()
        if parts is not None:
            self._deliver(parts)
            self._schedule()
        if self._is_full and not self._socket.closed:
            self._is_full = False
            self._on_writable()

    def _is_readable(self) -> bool:
        return bool(int(self._socket.get(_EVENTS)) & _POLLIN)

    def _receive(self) -> list[bytes] | None:
        try:
            parts = [self._socket.recv(_NOBLOCK)]
        except zmq.Again:
            return None  # woken for room, not for a message
        while self._socket.get(_MORE):
            parts.append(self._socket.recv(_NOBLOCK))
        return parts

    def _wait_writable(self) -> None:
        # The command that announces room may be eaten by any other call on the socket, and a ROUTER
        # cannot be asked about one line: so while something waits, a slow tick looks as well.
        if not self._is_full:
            self._is_full = True
            self._loop.call_later(_RETRY_S, self.read)

    def close(self, linger_s: float) -> None:
        """Closes the socket. Idempotent."""
        if self._socket.closed:
            return
        self._registry.discard(self)
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=int(linger_s * 1000))

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.read)


def _refuse_plain(address: str) -> None:
    """Raises unless what passes `address` stays on this host."""
    parts = urlsplit(address)
    if parts.scheme == "ipc":
        return
    if parts.scheme != "tcp":
        raise DeclarationError(f"link address {address!r}: use ipc://PATH or tcp://127.0.0.1:PORT")
    host = parts.hostname or ""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise DeclarationError(
            f"link address {address!r} leaves this host, which requires CURVE with the graph's key; "
            "that is not available yet, so use ipc:// or tcp://127.0.0.1"
        )
