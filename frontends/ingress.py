"""The HTTP ingress: raw bytes in, finished bytes out. It parses no body and formats no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from frontends.messages import HttpBody, HttpHead, HttpRequest
from graph import Calls, Component, Context, LaunchError, Listen, Options, Positive, TcpPort, Timeout, option

if TYPE_CHECKING:
    from frontends.gateway import Gateway
    from frontends.http_server import HttpServer


class FrontendOptions(Options, frozen=True, kw_only=True):
    """Options of the ingress."""

    host: Annotated[str, option("address to listen on")] = "127.0.0.1"
    port: Annotated[TcpPort, option("TCP port; 0 takes a free one")] = 8000
    max_body_mb: Annotated[Positive, option("larger request bodies are refused with 413")] = 16
    body_timeout_s: Annotated[Timeout, option("longest pause while a request body arrives")] = 30.0


class OpenAIFrontend(Component):
    """Accepts HTTP and hands the raw body to the least busy processor."""

    Options = FrontendOptions
    listens = Listen()
    requests = Calls(HttpRequest, (HttpHead, HttpBody))

    options: FrontendOptions
    _gateway: Gateway | None = None
    _server: HttpServer | None = None

    async def start(self, context: Context) -> None:
        from frontends.gateway import Gateway
        from frontends.http_server import HttpServer

        if context.listener is None:
            raise LaunchError("the ingress was given no listening socket")
        self._gateway = gateway = Gateway(
            context,
            context.client(type(self).requests),
            max_body_bytes=self.options.max_body_mb * 1024 * 1024,
            body_timeout_s=self.options.body_timeout_s,
        )
        self._server = HttpServer(gateway, context.listener)
        gateway.metrics.connections.set_function(lambda: self._server.num_connections if self._server else 0)
        await self._server.start()

    async def drain(self) -> None:
        if self._server is not None:
            await self._server.drain()

    async def stop(self) -> None:
        if self._gateway is not None:
            self._gateway.end()
        if self._server is not None:
            await self._server.close()
            self._server = None
