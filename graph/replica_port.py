"""What the supervisor asks of every replica: is it there, does it work, whom does it know, what has it counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from graph.component import Component, Stream
from graph.errors import DeadlineExceeded, LinkError
from graph.link import Links
from graph.metrics import Family, read_families
from graph.ports import Calls, Message, Serves

LOOP_PATIENCE_S = 10.0
"""How long a replica's event loop may take to answer; a stopped process does not."""

SEEN_TIMEOUT_S = 2.0
"""How long the others may take to know that a replica leaves, before it leaves without their word."""


class ReadMetrics(Message, frozen=True, array_like=True, tag=True):
    """Your metrics, please."""


class Families(Message, frozen=True, array_like=True, tag=True):
    """All metrics of one replica."""

    families: tuple[Family, ...]


class Ping(Message, frozen=True, array_like=True, tag=True):
    """Does your event loop turn?"""


class CheckWork(Message, frozen=True, array_like=True, tag=True):
    """Does real work still get done? See `Component.alive`."""


class Here(Message, frozen=True, array_like=True, tag=True):
    """Yes."""


class SeeDirectory(Message, frozen=True, array_like=True, tag=True):
    """Answer once you know this version of the directory, or a later one."""

    version: int


_REQUESTS = (ReadMetrics, Ping, CheckWork, SeeDirectory)
_REPLIES = (Families, Here)

WaitVersion = Callable[[int], "asyncio.Future[None]"]
"""Resolves once this replica goes by that version of the directory."""


def serve_replica_port(
    links: Links, component: Component, metrics: CollectorRegistry, wait_version: WaitVersion
) -> None:
    """Opens the port; called once, before the replica joins."""

    async def answer(request: Any, stream: Stream) -> None:
        match request:
            case ReadMetrics():
                stream.end(Families(read_families(metrics)))
                return
            case CheckWork():
                await component.alive()
            case SeeDirectory(version):
                await wait_version(version)
        stream.end(Here())

    links.serve(_port(), answer)


class Replicas:
    """The supervisor's end: asks one replica, or all of them."""

    def __init__(self, links: Links, nodes: Iterable[str]) -> None:
        calls = Calls(_REQUESTS, _REPLIES)
        calls.name = _port().name
        self._client = links.client(calls, dict.fromkeys(nodes, calls.name))

    async def families(self, ids: Iterable[str], timeout_s: float) -> Mapping[str, tuple[Family, ...]]:
        """The metrics of these replicas; who does not answer in time is left out."""
        asked = list(ids)
        answers = await asyncio.gather(*(self._try(ReadMetrics(), id, timeout_s) for id in asked))
        return {id: a.families for id, a in zip(asked, answers, strict=True) if isinstance(a, Families)}

    async def see(self, version: int, ids: Iterable[str]) -> None:
        """Returns when these replicas know that version of the directory; bounded, for one may hang or die."""
        await asyncio.gather(*(self._try(SeeDirectory(version), id, SEEN_TIMEOUT_S) for id in ids))

    async def is_silent(self, id: str) -> bool:
        """Whether the replica's event loop does not answer within `LOOP_PATIENCE_S`."""
        try:
            await self._client.call(Ping(), peer=id, timeout_s=LOOP_PATIENCE_S)
        except DeadlineExceeded:
            return True
        except LinkError:
            return False  # gone, or restarted: its process tells
        return False

    async def check_work(self, id: str, patience_s: float) -> LinkError | None:
        """Why no work gets done at the replica; None if it does, or the replica is gone."""
        try:
            await self._client.call(CheckWork(), peer=id, timeout_s=patience_s)
        except LinkError as error:
            return error
        return None

    async def _try(self, request: Message, id: str, timeout_s: float) -> Any:
        try:
            return await self._client.call(request, peer=id, timeout_s=timeout_s)
        except LinkError:
            return None


def _port() -> Serves:
    port = Serves(_REQUESTS, _REPLIES)
    port.name = "replica.control"  # can be no component's attribute
    return port
