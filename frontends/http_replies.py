"""What the ingress says itself: refusals in OpenAI's error envelope, and the ids of requests."""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec

from frontends.faults import may_retry
from graph import LinkError, NoPeer, Overloaded

Headers = tuple[tuple[str, str], ...]

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
_JSON = ("content-type", "application/json")
_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class Refusal(msgspec.Struct, frozen=True):
    """A reply that no processor made."""

    status: int
    message: str
    code: str
    retry_after_s: int | None = None
    allow: str | None = None
    close: bool = False  # the rest of the request's body is not wanted

    def headers(self) -> Headers:
        """The head of the reply, its length left out."""
        found = [_JSON]
        if self.retry_after_s is not None:
            found.append(("retry-after", str(self.retry_after_s)))
        if self.allow is not None:
            found.append(("allow", self.allow))
        if self.close:
            found.append(("connection", "close"))
        return tuple(found)

    def body(self) -> bytes:
        """OpenAI's error envelope."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return error_envelope(self.message, kind=kind, code=self.code)


def error_envelope(message: str, *, kind: str, code: str | None, param: str | None = None) -> bytes:
    """`{"error": {...}}` with the members every OpenAI client reads."""
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


def error_event(message: str, *, kind: str = "server_error", code: str | None = None) -> bytes:
    """The last event of a stream that failed after it began; no `[DONE]` follows it."""
    return b"data: " + error_envelope(message, kind=kind, code=code) + b"\n\n"


def bare_reply(refusal: Refusal) -> bytes:
    """A whole HTTP/1.1 reply, for a request that never reached the application."""
    body = refusal.body()
    reason = _REASONS.get(refusal.status, "Error")
    head = (
        f"HTTP/1.1 {refusal.status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"x-request-id: {mint_request_id()}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def mint_request_id() -> str:
    """A fresh x-request-id."""
    return os.urandom(12).hex()


def request_id(headers: Headers) -> str:
    """The client's x-request-id if it is safe to echo and to log, else a fresh one."""
    for name, value in headers:
        if name == "x-request-id" and _SANE_ID.fullmatch(value):
            return value
    return mint_request_id()


def link_refusal(error: LinkError) -> Refusal:
    """The HTTP form of a failure between ingress and processor."""
    if isinstance(error, NoPeer):
        return Refusal(503, "No processor is ready; try again.", code="no_processor", retry_after_s=1)
    if isinstance(error, Overloaded):
        return Refusal(429, "The processors are busy; try again.", code="overloaded", retry_after_s=_seconds(error))
    if error.code == "shutting_down":
        return Refusal(503, "The server is stopping.", code=error.code, retry_after_s=1)
    if may_retry(error):
        return Refusal(503, f"The processor was lost: {error.message}", code=error.code, retry_after_s=1)
    return Refusal(500, f"The processor failed: {error.message}", code=error.code)


def _seconds(error: LinkError) -> int:
    return max(1, round(error.retry_after_s or 1))
