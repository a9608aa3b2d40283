"""The prefill workers a decode worker is connected to.

seen        the registry lists it: the handshake starts at once, not with the first request
linked      layouts agree and a self-test over every pair of ranks has passed: prompts may be sent there
refused     its layout or back end does not fit; logged once, never used
lost        the registry dropped it, or its process has a new boot id: disconnected
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from components.messages import FollowPrefillQueue, KVHandshake, PrefillQueue
from components.transfer.agent import TransferError
from components.transfer.group import DriverGroup
from components.transfer.metrics import TransferMetrics
from components.transfer.plan import LayoutMismatch, Route, check_layouts, cover
from components.transfer.probe import ProbeTimeout, Speed, likely_cause
from graph import Client, GraphError, LinkError, Peer, Refused

HANDSHAKE_TIMEOUT_S = 10.0
LINK_PATIENCE_S = 3.0
"""How long after a prefill worker has appeared requests may wait for its link, while no other is linked."""

RETRY_S = 0.5
FOREVER_S = 1e8  # a queue that does not change is not told

logger = logging.getLogger(__name__)


class RankRoute(msgspec.Struct, frozen=True):
    """How one of our ranks reads from one of a peer's."""

    rank: int
    agent: str
    way: Route


class LinkedPrefill(msgspec.Struct, frozen=True):
    """A prefill worker whose blocks can be read, along `routes`: one for each pair of ranks that share heads."""

    id: str
    boot: str
    routes: tuple[RankRoute, ...]
    num_blocks: int


def check_handshake(ours: KVHandshake, theirs: KVHandshake) -> None:
    """Raises `Refused`, naming both values, unless KV can travel between the two replicas."""
    if ours.backend != theirs.backend:
        raise Refused(
            f"KV back ends differ: {ours.replica} uses {ours.backend!r}, {theirs.replica} uses {theirs.backend!r}",
            code="kv_mismatch",
        )
    for mine in ours.ranks:
        for other in theirs.ranks:
            try:
                check_layouts(other.layout, mine.layout)
            except LayoutMismatch as error:
                message = f"{ours.replica} (target) and {theirs.replica} (source): {error}"
                raise Refused(message, code="kv_mismatch") from error


class PrefillPeers:
    """Connects to every prefill worker that appears, and forgets those that go."""

    def __init__(
        self,
        client: Client,
        drivers: DriverGroup,
        own: KVHandshake,
        *,
        metrics: TransferMetrics,
        spawn: Callable[..., object],
        on_lost: Callable[[str], None],
        on_notice: Callable[[str], None],
    ) -> None:
        """`on_notice` hears what an operator should see, such as a slow link."""
        self._client = client
        self._drivers = drivers
        self._metrics = metrics
        self._on_notice = on_notice
        self._own = own
        self._spawn = spawn
        self._on_lost = on_lost
        self._linked: dict[str, LinkedPrefill] = {}
        self._boots: dict[str, str] = {}
        self._seen_s: dict[str, float] = {}
        self._refusals: dict[str, GraphError] = {}
        self._queues: dict[str, PrefillQueue] = {}
        self._news = asyncio.Event()  # one for each change: set, and replaced

    def follow(self) -> None:
        """Starts to follow the client's peers."""
        self._client.on_change(self._changed)

    def usable(self, preferred: str | None) -> LinkedPrefill | None:
        """The preferred prefill worker if it is linked, else any that is."""
        if preferred is not None and preferred in self._linked:
            return self._linked[preferred]
        return next(iter(self._linked.values()), None)

    @property
    def is_linking(self) -> bool:
        """Whether none is linked yet, and one that appeared a moment ago is shaking hands."""
        return not self._linked and asyncio.get_running_loop().time() < self._patient_until_s()

    async def settle(self) -> None:
        """Returns when none is being linked any more, as `is_linking` has it."""
        while self.is_linking:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._patient_until_s()):
                    await self._news.wait()

    def _patient_until_s(self) -> float:
        linking = self._seen_s.keys() - self._linked.keys() - self._refusals.keys()
        return max((self._seen_s[id] + LINK_PATIENCE_S for id in linking), default=0.0)

    def queue(self, id: str) -> PrefillQueue | None:
        """How long the queue of a prefill worker is, as it told last."""
        return self._queues.get(id)

    def refusal(self, preferred: str | None) -> GraphError | None:
        """Why the preferred prefill worker, else any that is there, cannot be used, if so."""
        if preferred is not None and preferred in self._refusals:
            return self._refusals[preferred]
        return next(iter(self._refusals.values()), None)

    def _changed(self, peers: Mapping[str, Peer]) -> None:
        for id, boot in list(self._boots.items()):
            if id not in peers or peers[id].boot != boot:
                self._drop(id)
        for peer in peers.values():
            if peer.id not in self._boots:
                self._boots[peer.id] = peer.boot
                self._seen_s[peer.id] = asyncio.get_running_loop().time()
                self._spawn(self._link(peer), name=f"handshake {peer.id}")

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _drop(self, id: str) -> None:
        del self._boots[id], self._seen_s[id]
        self._refusals.pop(id, None)
        self._queues.pop(id, None)
        linked = self._linked.pop(id, None)
        if linked is not None:
            self._disconnect(linked.routes)
        self._on_lost(id)
        self._tell()

    def _disconnect(self, routes: Iterable[RankRoute]) -> None:
        for agent in dict.fromkeys(route.agent for route in routes):
            self._drivers.disconnect(agent)

    async def _link(self, peer: Peer) -> None:
        """Shakes hands until it works, is refused, or the peer has gone."""
        while self._boots.get(peer.id) == peer.boot:
            try:
                theirs = await self._client.call(self._own, peer=peer.id, timeout_s=HANDSHAKE_TIMEOUT_S)
                check_handshake(self._own, theirs)
                routes = await self._connect(theirs)
            except ProbeTimeout as error:
                logger.warning("prefill worker %s does not answer the self-test, trying again: %s", peer.id, error)
                await asyncio.sleep(RETRY_S)
                continue
            except (Refused, LayoutMismatch, TransferError) as error:
                self._refuse(peer, error)
                return
            except LinkError as error:
                logger.info("handshake with %s failed, trying again: %s", peer.id, error)
                await asyncio.sleep(RETRY_S)
                continue
            self._book(peer, theirs, routes)
            return

    async def _connect(self, theirs: KVHandshake) -> tuple[RankRoute, ...]:
        """Connects every pair of ranks that share heads, and tests it; what was connected before a fault is undone."""
        layouts = [region.layout for region in theirs.ranks]
        routes: list[RankRoute] = []
        try:
            for own in self._own.ranks:
                for index, way in cover(layouts, own.layout):
                    region = theirs.ranks[index]
                    self._note_speed(theirs.replica, await self._drivers.link(own.rank, region, way))
                    routes.append(RankRoute(own.rank, region.agent, way))
        except TransferError:
            self._disconnect(routes)
            raise
        return tuple(routes)

    def _note_speed(self, peer: str, speed: Speed | None) -> None:
        """Books how fast a connection is; a slow one is told once for each start of the peer."""
        if speed is None:
            return
        self._metrics.link(peer, speed.bytes_per_s, is_slow=speed.is_slow)
        text = f"KV link to {peer}: {speed.bytes_per_s / 1e9:.2f} GB/s in pieces of {speed.piece_bytes >> 10} KiB"
        if not speed.is_slow:
            logger.info("%s", text)
            return
        text = f"{text} is slow; likely cause: {likely_cause(speed, os.environ)}"
        logger.warning("%s", text)
        self._on_notice(text)

    def _book(self, peer: Peer, theirs: KVHandshake, routes: tuple[RankRoute, ...]) -> None:
        if self._boots.get(peer.id) != peer.boot:
            self._disconnect(routes)
            return
        num_blocks = min(region.num_blocks - (region.probe_block is not None) for region in theirs.ranks)
        self._linked[peer.id] = LinkedPrefill(peer.id, theirs.boot, routes, num_blocks)
        self._tell()
        logger.info("linked to prefill worker %s", peer.id)
        self._follow_queue(peer)

    def _follow_queue(self, peer: Peer) -> None:
        """Listens to how long its queue is. Without it the wait there is just not looked at."""

        def on_end(error: LinkError | None) -> None:
            if self._boots.get(peer.id) == peer.boot:
                self._queues.pop(peer.id, None)

        def on_item(queue: Any) -> None:
            if self._boots.get(peer.id) == peer.boot:
                self._queues[peer.id] = queue

        self._client.open(FollowPrefillQueue(), peer=peer.id, timeout_s=FOREVER_S, on_item=on_item, on_end=on_end)

    def _refuse(self, peer: Peer, error: GraphError) -> None:
        if self._boots.get(peer.id) == peer.boot:
            self._refusals[peer.id] = error
            self._tell()
        logger.error("prefill worker %s cannot be used: %s", peer.id, error)
