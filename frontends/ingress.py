"""The HTTP ingress: raw bytes in, finished bytes out."""

from __future__ import annotations

from typing import Annotated

from frontends.messages import HttpBody, HttpHead, HttpRequest
from graph import Calls, Component, Listen, Options, option


class FrontendOptions(Options, frozen=True, kw_only=True):
    """Options of the ingress."""

    host: Annotated[str, option("address to listen on")] = "127.0.0.1"
    port: Annotated[int, option("TCP port; 0 takes a free one")] = 8000
    max_body_mb: Annotated[int, option("larger request bodies are refused with 413")] = 16
    body_timeout_s: Annotated[float, option("longest pause while a request body arrives")] = 30.0


class OpenAIFrontend(Component):
    """Accepts HTTP and hands the raw body to the least busy processor."""

    Options = FrontendOptions
    listens = Listen()
    requests = Calls(HttpRequest, (HttpHead, HttpBody))
