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
    entropy: int = 0  # 64 random bits, the same for every processor that gets this request; 0: none given
    attempt: int = 0  # how many processors had it before
    trail: bytes = b""  # what the one before had told, if its reply had begun; see `frontends.trail`


class HttpHead(Message, frozen=True, array_like=True, tag=True):
    """The first reply: status and headers."""

    status: int
    headers: tuple[tuple[str, str], ...]


class HttpBody(Message, frozen=True, array_like=True, tag=True):
    """Bytes to write as they are, and what another processor must know to go on behind them."""

    data: bytes
    trail: bytes = b""
