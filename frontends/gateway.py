"""The ASGI application of the ingress: routes between its own answers and the processors.

Life of a request here (see `http_exchange`): reading -> asking -> replying -> closed. /live, /health,
/metrics and refusals are the ingress's own; everything else is a processor's.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from frontends.balance import PeerPool
from frontends.http_exchange import ClientLeft, Exchange, Receive, RefusedHere, Send, read_body, send_refusal
from frontends.http_replies import Headers, Refusal, request_id
from frontends.http_server import ABORT, SURPLUS
from frontends.messages import HttpRequest
from graph import Client, Context

_log = logging.getLogger(__name__)
_TOO_MANY = Refusal(503, "Too many connections are open; try again.", code="too_many_connections", retry_after_s=1)

OWN_ROUTES = ("/live", "/health", "/metrics")
API_ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/router/explain",
)  # fmt: skip
METRICS_TIMEOUT_S = 2.0
CLIENT_CLOSED_REQUEST = 499  # as nginx counts a client that left before any status


class IngressMetrics:
    """What one ingress replica counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "headrace_http_requests", "HTTP requests by route and status", ["route", "status"], registry=registry
        )
        self.open_requests = Gauge("headrace_http_open_requests", "HTTP requests being answered", registry=registry)
        self.takeovers = Counter(
            "headrace_http_takeovers", "Requests given to another processor after one failed them", registry=registry
        )
        self.connections = Gauge("headrace_http_connections", "Open HTTP connections", registry=registry)


class Gateway:
    """The ASGI application: routes between the ingress's own answers and the processors."""

    def __init__(self, context: Context, client: Client, *, max_body_bytes: int, body_timeout_s: float) -> None:
        self.metrics = IngressMetrics(context.metrics)
        self._context = context
        self._client = client
        self._pool = PeerPool(client)
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._exchanges: set[Exchange] = set()

    def end(self) -> None:
        """The ingress is stopping: what is still open ends in an error that says so."""
        for exchange in list(self._exchanges):
            exchange.end()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        headers: Headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        identity = request_id(headers)
        status = 0
        self.metrics.open_requests.inc()
        try:
            if scope["path"] in OWN_ROUTES:  # whoever watches the server is answered on a surplus connection too
                status = await self._answer(scope, identity, send)
            elif SURPLUS in scope.get("extensions", {}):
                raise RefusedHere(_TOO_MANY)
            else:
                status = await self._forward(scope, headers, identity, receive, send)
        except ClientLeft:
            status = status or CLIENT_CLOSED_REQUEST
        except RefusedHere as refused:
            status = refused.refusal.status
            await send_refusal(refused.refusal, request_id=identity, receive=receive, send=send)
        except Exception:
            _log.exception("request %s failed in the ingress", identity)
            status = 500
            refusal = Refusal(500, "The ingress failed on this request.", code="internal_error")
            await send_refusal(refusal, request_id=identity, receive=receive, send=send)
        finally:
            self.metrics.open_requests.dec()
            self.metrics.requests.labels(_route(scope["path"]), str(status)).inc()

    async def _forward(self, scope: Any, headers: Headers, identity: str, receive: Receive, send: Send) -> int:
        body = await read_body(receive, headers, limit=self._max_body_bytes, pause_s=self._body_timeout_s)
        request = HttpRequest(
            id=identity,
            method=scope["method"],
            path=scope["path"],
            query=scope["query_string"].decode("latin-1"),
            headers=headers,
            body=body,
            received_s=time.time(),
            entropy=secrets.randbits(64),
        )
        abort = scope.get("extensions", {}).get(ABORT, {}).get("call", _nothing)
        exchange = Exchange(
            client=self._client,
            pool=self._pool,
            receive=receive,
            send=send,
            abort=abort,
            on_takeover=self.metrics.takeovers.inc,
        )
        self._exchanges.add(exchange)
        try:
            await exchange.run(request)
        except ClientLeft:
            return exchange.status or CLIENT_CLOSED_REQUEST
        finally:
            self._exchanges.discard(exchange)
        return exchange.status

    async def _answer(self, scope: Any, identity: str, send: Send) -> int:
        """/live, /health and /metrics."""
        if scope["method"] not in ("GET", "HEAD"):
            raise RefusedHere(Refusal(405, f"{scope['path']} takes GET.", code="method_not_allowed", allow="GET, HEAD"))
        status, content_type, body = await self._own_reply(scope["path"])
        headers = [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-cache"),
            (b"x-request-id", identity.encode()),
        ]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        return status

    async def _own_reply(self, path: str) -> tuple[int, bytes, bytes]:
        if path == "/live":
            return 200, b"application/json", b'{"status":"live"}'
        if path == "/metrics":
            text = await self._context.collect_metrics(METRICS_TIMEOUT_S)
            return 200, b"text/plain; version=0.0.4; charset=utf-8", text
        health = self._context.health()
        body = msgspec.json.encode({"status": health.state, "missing": health.missing, "nodes": health.nodes})
        return (200 if health.state in ("ready", "degraded") else 503), b"application/json", body


def _route(path: str) -> str:
    """The path as a metric's label; a bounded set of values."""
    if path in OWN_ROUTES or path in API_ROUTES:
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


def _nothing() -> None:
    """Stands in where the server cannot cut a connection."""
