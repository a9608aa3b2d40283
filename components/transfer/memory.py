"""The in-process transfer agent: copies between regions of one process, and can misbehave on demand.

It serves graphs that run within one process and stands in for NIXL in tests. Like NIXL it cannot
cancel: the bytes of a posted READ land when they are due, whoever has lost interest meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from uuid import uuid4

import msgspec

from components.messages import RankRegion
from components.transfer.agent import LocalRegion, State, TransferError, rank_region
from components.transfer.plan import Pieces, Route


class Faults(msgspec.Struct):
    """What the agent does wrong; tests change it while it runs."""

    delay_s: float = 0.0  # from `post` until the bytes land
    is_stuck: bool = False  # nothing lands while it holds
    fails_post: bool = False
    fails_reads: bool = False  # READs end as failed, with half of their bytes here
    fails_connect: bool = False


class _Read(msgspec.Struct, frozen=True):
    """A READ in flight."""

    peer: RankRegion
    pieces: Pieces
    due_s: float


class MemoryAgent:
    """Reads peers' regions by address, within one process."""

    def __init__(
        self, region: LocalRegion, faults: Faults | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = f"memory-{uuid4().hex}"
        self.region = rank_region(region, agent=self.name, metadata=str(os.getpid()).encode())
        self._faults = faults or Faults()
        self._clock = clock
        self._peers: dict[str, RankRegion] = {}
        self._reads: dict[int, _Read] = {}
        self._states: dict[int, State] = {}
        self._next_handle = 1

    def connect(self, peer: RankRegion, way: Route) -> None:
        if peer.metadata != self.region.metadata or self._faults.fails_connect:
            raise TransferError(
                f"agent {peer.agent!r} lives in another process (pid {peer.metadata.decode(errors='replace')}); "
                "cache_transceiver_config.backend 'memory' works within one process only, use NIXL"
            )
        self._peers[peer.agent] = peer

    def disconnect(self, agent: str) -> None:
        self._peers.pop(agent, None)

    def post(self, agent: str, pieces: Pieces) -> int:
        if agent not in self._peers:
            raise TransferError(f"agent {agent!r} is not connected")
        if self._faults.fails_post:
            raise TransferError(f"READ from {agent!r} could not be posted")
        handle = self._next_handle
        self._next_handle += 1
        self._reads[handle] = _Read(self._peers[agent], pieces, self._clock() + self._faults.delay_s)
        self._states[handle] = "pending"
        self.progress()
        return handle

    def poll(self, handle: int) -> State:
        self.progress()
        state = self._states[handle]
        if state != "pending":
            del self._states[handle]
        return state

    def progress(self) -> None:
        now = self._clock()
        for handle, read in list(self._reads.items()):
            if self._faults.is_stuck or read.due_s > now:
                continue
            del self._reads[handle]
            self._land(read.peer, read.pieces, share=0.5 if self._faults.fails_reads else 1.0)
            self._states[handle] = "failed" if self._faults.fails_reads else "done"

    def close(self) -> None:
        self._peers.clear()
        self._reads.clear()

    def _land(self, peer: RankRegion, pieces: Pieces, *, share: float) -> None:
        count = int(pieces.count * share)
        for at, to, size in zip(pieces.source[:count], pieces.target[:count], pieces.sizes[:count], strict=True):
            ctypes.memmove(self.region.base + int(to), peer.base + int(at), int(size))
