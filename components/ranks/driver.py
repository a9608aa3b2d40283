"""The transfer driver of another rank, seen from rank 0."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from components.messages import RankRegion
from components.ranks.messages import (
    RankAlive,
    RankLink,
    RankRead,
    RankReadEnded,
    RankUnlink,
    RankWatch,
    link_of,
    wire_part,
)
from components.transfer.agent import TransferError
from components.transfer.plan import Route
from components.transfer.probe import ProbeTimeout, Speed
from components.transfer.reads import OnResult, Part
from graph import Client, LinkError, Message, Refused

FOREVER_S = 1e8  # a READ cannot be cancelled, so its end is waited for
LINK_TIMEOUT_S = 60.0
TELL_TIMEOUT_S = 30.0
TIMED_OUT = "probe_timeout"

logger = logging.getLogger(__name__)


class RemoteDriver:
    """Does what a `TransferDriver` does, in the rank's own process. A rank that is lost ends the replica."""

    def __init__(self, client: Client, peer: str) -> None:
        self._client = client
        self._peer = peer

    async def link(self, peer: RankRegion, way: Route) -> Speed | None:
        """Makes a peer's rank readable and tests it. Raises `TransferError`."""
        request: RankLink = link_of(peer, way)
        try:
            answer = await self._client.call(request, peer=self._peer, timeout_s=LINK_TIMEOUT_S)
        except Refused as error:
            kind = ProbeTimeout if error.code == TIMED_OUT else TransferError
            raise kind(f"{self._peer}: {error.message}") from error
        speed: Speed | None = answer.speed
        return speed

    def disconnect(self, agent: str) -> None:
        """Forgets a peer's rank."""
        self._tell(RankUnlink(agent))

    def read(self, parts: Sequence[Part], on_result: OnResult) -> None:
        """Starts a READ; without an answer, which means the rank is lost, its blocks stay where they are."""
        ended: list[RankReadEnded] = []

        def on_end(error: LinkError | None) -> None:
            if ended:
                on_result(ended[0].result)
            else:
                logger.error("%s did not tell how a READ ended: %s", self._peer, error)

        request = RankRead(tuple(wire_part(part) for part in parts))
        self._client.open(request, peer=self._peer, timeout_s=FOREVER_S, on_item=ended.append, on_end=on_end)

    def watch(self, is_on: bool) -> None:
        """Whether peers may be reading from there."""
        self._tell(RankWatch(is_on))

    def watch_for(self, seconds: float) -> None:
        """Like `watch(True)`, for a while."""
        self._tell(RankWatch(True, seconds))

    async def alive(self) -> None:
        """Returns when the rank's transfer thread has made a turn."""
        await self._client.call(RankAlive(), peer=self._peer, timeout_s=TELL_TIMEOUT_S)

    async def close(self) -> None:
        """Nothing to do: the process ends with the replica."""

    def _tell(self, request: Message) -> None:
        def on_end(error: LinkError | None) -> None:
            if error is not None:
                logger.info("%s was not told %s: %s", self._peer, type(request).__name__, error)

        self._client.open(request, peer=self._peer, timeout_s=TELL_TIMEOUT_S, on_item=_ignore, on_end=on_end)


def _ignore(_: Any) -> None:
    """The answer says nothing more than that it was done."""
