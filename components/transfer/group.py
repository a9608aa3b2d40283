"""All ranks' transfer drivers of one worker, driven as one.

Rank 0 plans and says what each rank reads; a transfer is done when every rank's part of it is. A rank
that cannot be reached any more ends the whole replica, so nothing here makes up for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec

from components.messages import RankRegion
from components.transfer.plan import Pieces, Route
from components.transfer.probe import Speed
from components.transfer.reads import OnResult, Part, ReadResult


class RankPart(msgspec.Struct, frozen=True):
    """What our rank `rank` READs from the peer's agent."""

    rank: int
    agent: str
    pieces: Pieces


class RankDriver(Protocol):
    """One rank's driver, in this process or in another."""

    async def link(self, peer: RankRegion, way: Route) -> Speed | None:
        """Makes a peer's rank readable and tests it; raises `TransferError`."""

    def disconnect(self, agent: str) -> None: ...

    def read(self, parts: Sequence[Part], on_result: OnResult) -> None: ...

    def watch(self, is_on: bool) -> None: ...

    def watch_for(self, seconds: float) -> None: ...

    async def alive(self) -> None: ...

    async def close(self) -> None: ...


class DriverGroup:
    """The drivers of all ranks, by rank. All methods belong to the event loop's thread."""

    def __init__(self, drivers: Sequence[RankDriver]) -> None:
        self._drivers = tuple(drivers)
        self._is_watching = False

    async def link(self, rank: int, peer: RankRegion, way: Route) -> Speed | None:
        """Makes a peer's rank readable for one of ours and tests it; raises `TransferError`."""
        return await self._drivers[rank].link(peer, way)

    def disconnect(self, agent: str) -> None:
        """Forgets a peer's rank everywhere."""
        for driver in self._drivers:
            driver.disconnect(agent)

    def read(self, parts: Sequence[RankPart], on_result: OnResult) -> None:
        """Starts a READ; `on_result` comes exactly once, when no byte of it can land any more on any rank."""
        by_rank: dict[int, list[Part]] = {}
        for part in parts:
            by_rank.setdefault(part.rank, []).append((part.agent, part.pieces))
        results: list[ReadResult] = []

        def ended(result: ReadResult) -> None:
            results.append(result)
            if len(results) == len(by_rank):
                on_result(_together(results))

        for rank, own in by_rank.items():
            self._drivers[rank].read(own, ended)

    def watch(self, is_on: bool) -> None:
        """Whether peers may be reading from here: then their READs need our progress."""
        if is_on != self._is_watching:
            self._is_watching = is_on
            for driver in self._drivers:
                driver.watch(is_on)

    def watch_for(self, seconds: float) -> None:
        """Like `watch(True)`, for a while."""
        for driver in self._drivers:
            driver.watch_for(seconds)

    async def alive(self) -> None:
        """Returns when every rank's driver has made a turn."""
        await asyncio.gather(*(driver.alive() for driver in self._drivers))

    async def close(self) -> None:
        """Waits a while for READs in flight, then frees the agents."""
        await asyncio.gather(*(driver.close() for driver in self._drivers))


def _together(results: Sequence[ReadResult]) -> ReadResult:
    """The ranks work side by side: their bytes add up, the slowest one's times count."""
    slowest = max(results, key=lambda r: r.wait_ms + r.post_ms + r.wire_ms)
    return ReadResult(
        error=next((r.error for r in results if r.error is not None), None),
        descriptors=sum(r.descriptors for r in results),
        num_bytes=sum(r.num_bytes for r in results),
        wait_ms=slowest.wait_ms,
        post_ms=slowest.post_ms,
        wire_ms=slowest.wire_ms,
    )
