"""The in-process transport: joins the links of one process, through the same codec as ZeroMQ."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import count

from graph.errors import DeclarationError
from graph.link.wire import LineDown

_HIGH_WATER = 32  # wire messages per line and direction, as on a socket


class InProcess:
    """Shared by all `Links` that are to reach each other; addresses are any strings."""

    def __init__(self) -> None:
        self._listeners: dict[str, InProcessListener] = {}
        self._lines = count(1)

    def listen(
        self, address: str, on_message: Callable[[bytes, bytes], None], on_writable: Callable[[], None]
    ) -> InProcessListener:
        """Takes the address, and what dialers have sent there already."""
        if address in self._listeners and self._listeners[address].is_open:
            raise DeclarationError(f"link address {address!r} is taken in this process")
        waiting = self._listeners.get(address)
        listener = InProcessListener(address, on_message, on_writable)
        self._listeners[address] = listener
        if waiting is not None:
            listener.adopt(waiting)
        return listener

    def dial(
        self, address: str, on_message: Callable[[bytes], None], on_writable: Callable[[], None]
    ) -> InProcessDialer:
        """Opens a line to whoever listens at the address, now or later."""
        if address not in self._listeners:
            self._listeners[address] = InProcessListener(address, None, None)
        line = next(self._lines).to_bytes(8, "big")
        return InProcessDialer(line, lambda: self._listeners[address], on_message, on_writable)

    def drain(self) -> None:
        """Nothing is ever on its way longer than one turn of the loop."""

    async def close(self) -> None:
        """Nothing is shared that would have to be freed."""


class _Pipe:
    """One direction of a line: delivers in order, one turn of the loop later."""

    def __init__(self, deliver: Callable[[bytes], None] | None, on_writable: Callable[[], None] | None) -> None:
        self.deliver = deliver
        self._on_writable = on_writable
        self._waiting: deque[bytes] = deque()
        self._is_full = False
        self._loop = asyncio.get_running_loop()

    def send(self, data: bytearray) -> bool:
        """Takes one wire message, unless too many wait."""
        if len(self._waiting) >= _HIGH_WATER:
            self._is_full = True
            return False
        self._waiting.append(bytes(data))
        if len(self._waiting) == 1:
            self.wake()
        return True

    def wake(self) -> None:
        """Delivers what waits, in the next turn."""
        self._loop.call_soon(self._deliver_waiting)

    def _deliver_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            if self.deliver is None:
                return
            self.deliver(self._waiting.popleft())
        if self._waiting:
            self.wake()
        if self._is_full and self._on_writable is not None:
            self._is_full = False
            self._on_writable()


class InProcessListener:
    """The server's end. One without callbacks only holds what comes before anybody listens."""

    def __init__(
        self,
        address: str,
        on_message: Callable[[bytes, bytes], None] | None,
        on_writable: Callable[[], None] | None,
    ) -> None:
        self.address = address
        self.on_writable = on_writable
        self._on_message = on_message
        self._dialers: dict[bytes, InProcessDialer] = {}

    @property
    def is_open(self) -> bool:
        """Whether somebody listens."""
        return self._on_message is not None

    def adopt(self, waiting: InProcessListener) -> None:
        """Takes over the lines of a predecessor that never, or no longer, listened."""
        for dialer in list(waiting._dialers.values()):
            self.join(dialer)

    def join(self, dialer: InProcessDialer) -> None:
        """Adds one line."""
        self._dialers[dialer.line] = dialer
        if self._on_message is not None:
            on_message, line = self._on_message, dialer.line
            dialer.to_server.deliver = lambda data: on_message(line, data)
            dialer.to_server.wake()

    def leave(self, line: bytes) -> None:
        """Forgets one line."""
        self._dialers.pop(line, None)

    def send(self, line: bytes, data: bytearray) -> bool:
        """Sends to one line."""
        dialer = self._dialers.get(line)
        if dialer is None or not self.is_open:
            raise LineDown
        return dialer.to_caller.send(data)

    def close(self, linger_s: float) -> None:
        """Stops listening; later messages wait for the next listener."""
        self._on_message = None
        for dialer in self._dialers.values():
            dialer.to_server.deliver = None


class InProcessDialer:
    """The caller's end."""

    def __init__(
        self,
        line: bytes,
        listener: Callable[[], InProcessListener],
        on_message: Callable[[bytes], None],
        on_writable: Callable[[], None],
    ) -> None:
        self.line = line
        self.to_server = _Pipe(None, on_writable)
        self.to_caller = _Pipe(on_message, self._server_writable)
        self._listener = listener
        listener().join(self)

    def send(self, data: bytearray) -> bool:
        """Sends to the listener."""
        return self.to_server.send(data)

    def close(self, linger_s: float) -> None:
        """Closes the line; what was sent before still arrives."""
        self.to_caller.deliver = None
        self._listener().leave(self.line)

    def _server_writable(self) -> None:
        on_writable = self._listener().on_writable
        if on_writable is not None:
            on_writable()
