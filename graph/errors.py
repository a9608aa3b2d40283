"""The exceptions of the SDK, and the form in which a failure crosses a link.

    GraphError
      DeclarationError        a graph, an option or an edge is declared wrongly
      LaunchError             a replica could not be started
      LinkError               a request over an edge ended without its answer
        NoPeer                nobody ready serves the edge now; worth a retry
        PeerLost              the peer died or left while it owed an answer
        DeadlineExceeded      the peer did not answer in time
        Overloaded            a bounded queue is full; worth a retry after `retry_after_s`
        RequestCancelled      the caller, or the peer's shutdown, cancelled it
        Refused               the peer understood and declined; `code` says why
        PeerFault             the peer failed while it handled the request
        ProtocolFault         the bytes of a message do not fit the port's types

Every failed request ends in exactly one of the `LinkError`s, on both sides of the link.
"""

from __future__ import annotations

import msgspec


class GraphError(Exception):
    """Base of everything this package raises on purpose."""


class DeclarationError(GraphError):
    """A graph, an option or an edge is declared wrongly; the message says which and what to do."""


class LaunchError(GraphError):
    """A replica could not be started."""


class LinkError(GraphError):
    """A request over an edge ended without its answer.

    `code` is the machine-readable reason; `retry_after_s` is set where a retry may help.
    """

    code: str = "link_error"

    def __init__(self, message: str, *, code: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.retry_after_s = retry_after_s


class NoPeer(LinkError):
    """Nobody ready serves the edge now."""

    code = "no_peer"


class PeerLost(LinkError):
    """The peer died or left while it owed an answer."""

    code = "peer_lost"


class DeadlineExceeded(LinkError):
    """The peer did not answer in time; the message names the edge and the peer."""

    code = "deadline_exceeded"


class Overloaded(LinkError):
    """A bounded queue is full."""

    code = "overloaded"


class RequestCancelled(LinkError):
    """The caller, or the peer's shutdown, cancelled the request."""

    code = "cancelled"


class Refused(LinkError):
    """The peer understood the request and declined it; `code` says why."""

    code = "refused"


class PeerFault(LinkError):
    """The peer failed while it handled the request."""

    code = "internal_error"


class ProtocolFault(LinkError):
    """The bytes of a message do not fit the types its port declares."""

    code = "protocol_fault"


_KINDS: tuple[type[LinkError], ...] = (
    NoPeer,
    PeerLost,
    DeadlineExceeded,
    Overloaded,
    RequestCancelled,
    Refused,
    PeerFault,
    ProtocolFault,
)


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A `LinkError` as it crosses a link: the class's name, the message, the code, the retry hint."""

    kind: str
    message: str
    code: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: LinkError) -> Failure:
        """The wire form of `error`."""
        return cls(type(error).__name__, error.message, error.code, error.retry_after_s)

    def error(self) -> LinkError:
        """The exception this failure stands for; an unknown kind becomes a `PeerFault`."""
        kind = next((k for k in _KINDS if k.__name__ == self.kind), PeerFault)
        return kind(self.message, code=self.code, retry_after_s=self.retry_after_s)
