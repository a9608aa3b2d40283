"""The transfer agent: what moves KV bytes between registered regions.

Life of a READ, on the one thread that drives the agent:

    posted    `post` took it; bytes may land in our region from now on
    pending   `poll` says so until the transport knows better; nothing cancels it
    done      all bytes are here
    failed    the transport gave up; some bytes may have landed, no more will

A handle leaves the agent with the first `poll` that says done or failed. Until then the target
blocks belong to the transport, whatever becomes of the request.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from components.messages import KVLayout, RankRegion
from components.transfer.plan import Pieces, Route
from graph import GraphError

State = Literal["pending", "done", "failed"]


class TransferError(GraphError):
    """The transport failed or refused; the message says which peer and why."""


class LocalRegion(msgspec.Struct, frozen=True):
    """The region an agent registers: this rank's KV pool."""

    layout: KVLayout
    base: int  # address of block 0
    num_blocks: int
    block_bytes: int
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    device: int = 0
    rank: int = 0
    probe_block: int | None = None  # no sequence's: what the self-test reads and writes

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class TransferAgent(Protocol):
    """Moves bytes for one rank. Not thread-safe: one thread makes it and calls it."""

    @property
    def name(self) -> str:
        """Unique for every start of the process."""

    @property
    def region(self) -> RankRegion:
        """What a peer must know to read from here."""

    def connect(self, peer: RankRegion, way: Route) -> None:
        """Makes `peer` readable along `way`; raises `TransferError`."""

    def disconnect(self, agent: str) -> None:
        """Forgets a peer; READs from it that are in flight stay pending until they end. Idempotent."""

    def post(self, agent: str, pieces: Pieces) -> int:
        """Starts a READ from a connected peer and returns its handle; raises `TransferError`."""

    def poll(self, handle: int) -> State:
        """The state of a READ; the handle is gone once it is done or failed."""

    def progress(self) -> None:
        """Lets the transport work, also for peers that read from here."""

    def close(self) -> None:
        """Frees everything. Idempotent."""


def rank_region(region: LocalRegion, *, agent: str, metadata: bytes) -> RankRegion:
    """The wire form of a registered region."""
    return RankRegion(
        rank=region.rank,
        agent=agent,
        metadata=metadata,
        layout=region.layout,
        base=region.base,
        num_blocks=region.num_blocks,
        memory=region.memory,
        device=region.device,
        probe_block=region.probe_block,
    )
