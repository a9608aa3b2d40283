"""The HTTP/1.1 server: uvicorn's httptools protocol on a socket that is already bound.

Life of a connection:

    head       waiting for, or reading, a request's head; too long or too slow ends it (431, 408)
    exchange   uvicorn runs the application for the request
    idle       kept alive; uvicorn's timer ends it
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from frontends.http_replies import Refusal, bare_reply

App = Callable[[Any, Any, Any], Awaitable[None]]

ABORT = "headrace.abort"
"""Name of the scope's extension that cuts the connection without flushing it."""

SURPLUS = "headrace.surplus"
"""Name of the extension of a scope whose connection is beyond `max_connections`: one reply, no work."""

MAX_HEAD_BYTES = 32 * 1024
HEAD_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 75
UNREAD_TIMEOUT_MS = 60_000
IDLE_GRACE_S = 1.0
"""How long a server that drains leaves idle connections open: a request may be on its way on one."""

CLOSE_GRACE_S = 1.0
_LEAST_RESERVE = 64


def max_connections(file_limit: int) -> int:
    """Connections to serve under a limit of open files: an eighth is kept back for refusals and everything else.

    At the limit itself the kernel gives no descriptor to say anything on, and the event loop drops what comes.
    """
    return max(1, file_limit - max(_LEAST_RESERVE, file_limit // 8))


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on a request's head and JSON refusals."""

    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, draining: asyncio.Event, most: int, **rest: Any) -> None:
        super().__init__(**rest)
        self._draining = draining
        self._most = most
        self._is_surplus = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_surplus = len(self.connections) > self._most
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(Refusal(431, f"The request's head exceeds {MAX_HEAD_BYTES} bytes.", code="head_too_large"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}
        if self._is_surplus:
            self.scope["extensions"][SURPLUS] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._header_bytes > MAX_HEAD_BYTES:
            raise ValueError("head too large")  # reaches `send_400_response`
        self._in_head = False
        self._stop_head_timer()
        super().on_headers_complete()
        if (self._draining.is_set() or self._is_surplus) and self.cycle is not None:
            self.cycle.keep_alive = False  # the reply says so to the client

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        if self._header_bytes > MAX_HEAD_BYTES:
            self._refuse(Refusal(431, f"The request's head exceeds {MAX_HEAD_BYTES} bytes.", code="head_too_large"))
        else:
            self._refuse(Refusal(400, msg, code="invalid_http"))

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection, or one whose client never read the last reply, ends without a flush."""
        self.transport.abort()

    def _expect_head(self) -> None:
        self._header_bytes = 0
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_too_slow)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_slow(self) -> None:
        if self._head_bytes == 0:  # a connection made in advance and never used
            self.transport.close()
            return
        self._refuse(Refusal(408, f"The request's head took longer than {HEAD_TIMEOUT_S:.0f} s.", code="head_timeout"))

    def _refuse(self, refusal: Refusal) -> None:
        """Answers outside of any exchange and closes; silent if an earlier reply is still being written."""
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(bare_reply(refusal))
        self.transport.close()


class HttpServer:
    """Accepts connections on one listening socket until closed."""

    def __init__(self, app: App, listener: socket.socket) -> None:
        self._config = Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._listener = listener
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._draining = asyncio.Event()
        self._most = max_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    @property
    def num_connections(self) -> int:
        """Connections open now, idle ones included."""
        return len(self._state.connections)

    @property
    def _connections(self) -> list[_Protocol]:
        return [connection for connection in self._state.connections if isinstance(connection, _Protocol)]

    async def start(self) -> None:
        """Starts accepting."""
        self._config.load()
        # What a client leaves unread for so long is dropped by the kernel, a closing connection's last reply too.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_MS)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._make_protocol, sock=self._listener, backlog=2048)

    async def drain(self) -> None:
        """Accepts no more, lets every connection end with its next reply, closes those that stay idle; returns when
        the busy ones are done."""
        self._stop_accepting()
        self._draining.set()
        for connection in self._connections:
            if not connection.is_idle:
                connection.shutdown()
        if any(connection.is_idle for connection in self._connections):
            await asyncio.sleep(IDLE_GRACE_S)
        for connection in self._connections:
            connection.shutdown()
        while self._state.tasks:
            await asyncio.wait(set(self._state.tasks))

    async def close(self) -> None:
        """Accepts no more; gives running replies a moment to end, and cuts whatever is still open then."""
        self._stop_accepting()
        tasks = set(self._state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_GRACE_S)
        for connection in self._connections:
            connection.transport.abort()
        tasks = set(self._state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_GRACE_S)

    def _make_protocol(self) -> asyncio.Protocol:
        return _Protocol(self._draining, self._most, config=self._config, server_state=self._state, app_state={})

    def _stop_accepting(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
