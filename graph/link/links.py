"""All links of one replica process (signatures only for now)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from graph.component import Client, Handler, Peer, Publisher, Subscription
from graph.link.wire import Transport
from graph.ports import Calls, Message, Publishes, Serves, Subscribes


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one replica's links."""

    backlog_bytes: int = 64 << 20


class Links:
    """Everything one replica sends and receives."""

    def __init__(
        self, id: str, boot: str, *, transport: Transport, listen: str | None = None, limits: Limits | None = None
    ) -> None:
        raise NotImplementedError

    @property
    def address(self) -> str:
        """Where others reach this replica."""
        raise NotImplementedError

    def serve(self, port: Serves, handler: Handler, *, max_streams: int = 100_000) -> None:
        """Answers the requests that arrive at `port`."""
        raise NotImplementedError

    def client(self, port: Calls, targets: Mapping[str, str]) -> Client:
        """The client of `port`; `targets` maps each linked node to the name of its port."""
        raise NotImplementedError

    def publisher(self, port: Publishes, snapshot: Callable[[], Message]) -> Publisher:
        """The publisher of `port`."""
        raise NotImplementedError

    def subscribe(self, port: Subscribes, subscription: Subscription, targets: Mapping[str, str]) -> None:
        """Follows `port` at every live peer of the nodes in `targets`."""
        raise NotImplementedError

    def set_peers(self, live: Iterable[Peer]) -> None:
        """Takes the registry's word on who is alive, this replica included or not."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends every call and stream, then closes the sockets. Idempotent."""
        raise NotImplementedError
