"""The server's half of the links: all served ports of one replica behind one listener."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from graph.errors import Failure, LinkError, NoPeer, Overloaded, PeerFault, PeerLost, ProtocolFault, RequestCancelled
from graph.link.codec import LINE, MALFORMED, Bye, Frame, Hello, Kind, decode_batch, decoder, fault
from graph.link.streams import Caller, Served, ServerStream
from graph.link.wire import Outbox, Traffic
from graph.words import counted

log = logging.getLogger(__name__)

_hello = decoder(Hello)


class Server:
    """Takes frames from a listener, and gives requests to handlers."""

    def __init__(
        self,
        id: str,
        boot: str,
        *,
        send: Callable[[bytes, bytearray], bool],
        loop: asyncio.AbstractEventLoop,
        traffic: Traffic,
        max_bytes: int,
    ) -> None:
        self._id = id
        self._boot = boot
        self._send = send
        self._loop = loop
        self._traffic = traffic
        self._max_bytes = max_bytes
        self._ports: dict[str, Served] = {}
        self._callers: dict[bytes, Caller] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_streams = 0

    def serve(self, served: Served) -> None:
        """Adds a port."""
        self._ports[served.name] = served

    def receive(self, line: bytes, data: bytes) -> None:
        """Handles one wire message; whatever it holds, only its own line can suffer."""
        self._traffic.num_received += 1
        caller = self._callers.get(line)
        try:
            frames = decode_batch(data)
        except ProtocolFault as error:
            self._traffic.num_faults += 1
            if caller is not None:
                caller.cut(error)
            return
        for frame in frames:
            if frame.kind == Kind.HELLO:
                caller = self._greet(line, frame)
            elif caller is None:
                self._refuse(line, PeerLost(f"{self._id} does not know this line; it was reset"), is_leaving=False)
                return
            elif frame.kind == Kind.BYE:
                self._lose(line)
                return
            else:
                self._handle(caller, frame)

    def forget(self, id: str, boot: str) -> None:
        """Cancels the streams of a start of a replica that is dead."""
        for line, caller in list(self._callers.items()):
            if caller.id == id and caller.boot == boot:
                del self._callers[line]
                caller.cut(PeerLost(f"{self._id} was told that {id} is dead"))

    def flush(self) -> None:
        """Sends what waited for room."""
        for caller in list(self._callers.values()):
            caller.outbox.flush()

    async def close(self) -> None:
        """Cancels all streams, tells the callers, and ends the running handlers."""
        for caller in list(self._callers.values()):
            caller.outbox.flush()  # ends that were sent just now count
            caller.cut(RequestCancelled(f"{self._id} is stopping"), is_leaving=True)
            caller.outbox.flush()
        self._callers.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _greet(self, line: bytes, frame: Frame) -> Caller | None:
        try:
            hello: Hello = _hello(frame.payload)
        except MALFORMED:
            self._traffic.num_faults += 1
            return self._callers.get(line)
        if hello.server_boot not in ("", self._boot):
            self._refuse(line, PeerLost(f"{self._id} was restarted"), is_leaving=True)
            return None
        for other, caller in list(self._callers.items()):
            if caller.id == hello.id:  # a replica has one line to another, so its older ones are dead
                self._lose(other)
        self._callers[line] = caller = Caller(hello, self._outbox(line), self._max_bytes)
        return caller

    def _refuse(self, line: bytes, error: LinkError, *, is_leaving: bool) -> None:
        self._outbox(line).put((LINE, Kind.BYE, Bye(Failure.of(error), is_leaving)))

    def _outbox(self, line: bytes) -> Outbox:
        return Outbox(
            lambda data: self._send(line, data),
            loop=self._loop,
            traffic=self._traffic,
            on_down=lambda: self._lose(line),
        )

    def _lose(self, line: bytes) -> None:
        caller = self._callers.pop(line, None)
        if caller is not None:
            caller.outbox.discard()
            caller.cancel()

    def _handle(self, caller: Caller, frame: Frame) -> None:
        if frame.kind == Kind.REQUEST:
            if frame.stream not in caller.streams:
                self._open(caller, frame)
        elif frame.kind == Kind.CANCEL:
            stream = caller.streams.get(frame.stream)
            if stream is not None:
                stream.cancel()
        else:
            self._traffic.num_faults += 1
            error = ProtocolFault(f"{self._id} was sent a frame of unknown kind {frame.kind}")
            caller.put((frame.stream, Kind.FAILURE, Failure.of(error)))

    def _open(self, caller: Caller, frame: Frame) -> None:
        served = self._ports.get(frame.port)
        if served is None:
            error: LinkError = NoPeer(f"{self._id} does not serve a port {frame.port!r}", retry_after_s=1.0)
        elif served.num_streams >= served.max_streams:
            error = Overloaded(
                f"{self._id} has {counted(served.max_streams, 'open request')} at {frame.port!r}", retry_after_s=1.0
            )
        else:
            try:
                request = served.decode(frame.payload)
            except MALFORMED as malformed:
                error = fault(malformed)
            else:
                self._num_streams += 1
                stream = ServerStream(f"{self._boot}-{self._num_streams}", frame.stream, caller, served)
                caller.streams[frame.stream] = stream
                served.num_streams += 1
                self._run(served, request, stream)
                return
        caller.put((frame.stream, Kind.FAILURE, Failure.of(error)))

    def _run(self, served: Served, request: Any, stream: ServerStream) -> None:
        try:
            work = served.handler(request, stream)
        except Exception as error:
            self._fail(served, stream, error)
            return
        if work is not None:
            task = self._loop.create_task(self._await(served, work, stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _await(self, served: Served, work: Awaitable[None], stream: ServerStream) -> None:
        try:
            await work
        except asyncio.CancelledError:
            stream.fail(RequestCancelled(f"{self._id} is stopping"))
            raise
        except Exception as error:
            self._fail(served, stream, error)

    def _fail(self, served: Served, stream: ServerStream, error: Exception) -> None:
        if not isinstance(error, LinkError):
            log.error("%s failed at a request to %r", self._id, served.name, exc_info=error)
            error = PeerFault(f"{self._id} failed while handling a request to {served.name!r}; see its log")
        stream.fail(error)
