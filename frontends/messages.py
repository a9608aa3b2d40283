"""What passes between the HTTP ingress and the processors: raw bytes in, finished bytes out."""

from __future__ import annotations

from graph import Message


class HttpRequest(Message, frozen=True, array_like=True, tag=True):
    """One HTTP request as it arrived; the ingress has parsed nothing of its body."""

    id: str  # x-request-id, given by the client or minted
    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]  # lower-case names
    body: bytes
    received_s: float  # unix time


class HttpHead(Message, frozen=True, array_like=True, tag=True):
    """The first reply: status and headers."""

    status: int
    headers: tuple[tuple[str, str], ...]


class HttpBody(Message, frozen=True, array_like=True, tag=True):
    """Bytes to write as they are."""

    data: bytes
