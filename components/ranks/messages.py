"""What rank 0 tells the other ranks of its replica, and what they answer. Arrays travel as raw little-endian bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from components.engine.runner import Batch
from components.messages import KVLayout, RankRegion
from components.transfer.plan import Pieces, Route, Slots
from components.transfer.probe import Speed
from components.transfer.reads import Part, ReadResult
from graph import Calls, Message, Serves


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON line on a rank's standard input; the pipe stays open as long as rank 0 lives."""

    title: str
    boot: str
    rank: int
    size: int
    store: str
    address: str
    options: dict[str, Any]  # of `DisaggOptions`
    num_threads: int
    gpu_share: float
    parent_pid: int


class RankJoin(Message, frozen=True, array_like=True, tag=True):
    """The first request: answered once the model is loaded and the KV pool registered."""


class RankReady(Message, frozen=True, array_like=True, tag=True):
    """The rank can run steps. `region` is what peers read from, where a transfer back end is set."""

    region: RankRegion | None


class RankStep(Message, frozen=True, array_like=True, tag=True):
    """Run a step; see `components.engine.runner.Batch`. No tokens are chosen."""

    input_ids: bytes
    positions: bytes
    cu_seqlens_q: bytes
    seq_lens: bytes
    blocks: bytes
    cu_blocks: bytes
    slot_mapping: bytes


class RankDone(Message, frozen=True, array_like=True, tag=True):
    """What was asked for has been done."""


class RankLink(Message, frozen=True, array_like=True, tag=True):
    """Make a peer's rank readable along the route of these heads, and test it."""

    peer: RankRegion
    target: KVLayout
    head_start: int
    head_stop: int
    source_slots: Slots | None
    target_slots: Slots | None


class RankLinked(Message, frozen=True, array_like=True, tag=True):
    """It is readable; how fast, if it could be tested."""

    speed: Speed | None


class RankUnlink(Message, frozen=True, array_like=True, tag=True):
    """Forget a peer's rank."""

    agent: str


class WirePart(msgspec.Struct, frozen=True, array_like=True):
    """Pieces to READ from one agent: int64 offsets and sizes, and int32 block ids where pieces are whole slots."""

    agent: str
    source: bytes
    target: bytes
    sizes: bytes
    blocks: tuple[bytes, bytes] | None


class RankRead(Message, frozen=True, array_like=True, tag=True):
    """READ these pieces into your region; answered when no byte of them can land any more."""

    parts: tuple[WirePart, ...]


class RankReadEnded(Message, frozen=True, array_like=True, tag=True):
    """How a READ ended."""

    result: ReadResult


class RankWatch(Message, frozen=True, array_like=True, tag=True):
    """Peers may be reading from you: for `seconds`, or until told otherwise."""

    is_on: bool
    seconds: float | None = None


class RankAlive(Message, frozen=True, array_like=True, tag=True):
    """Answered once the transfer thread has made a turn."""


REQUESTS = (RankJoin, RankStep, RankLink, RankUnlink, RankRead, RankWatch, RankAlive)
REPLIES = (RankReady, RankDone, RankLinked, RankReadEnded)
PORT = "ranks"
NODE = "rank"


def served_port() -> Serves:
    """The port that a rank serves."""
    port = Serves(REQUESTS, REPLIES)
    port.name = PORT
    return port


def called_port() -> Calls:
    """Rank 0's side of it."""
    port = Calls(REQUESTS, REPLIES)
    port.name = PORT
    return port


def step_of(batch: Batch) -> RankStep:
    """A batch for the wire, without what only rank 0 needs."""
    return RankStep(
        _pack(batch.input_ids, "<i4"),
        _pack(batch.positions, "<i4"),
        _pack(batch.cu_seqlens_q, "<i4"),
        _pack(batch.seq_lens, "<i4"),
        _pack(batch.blocks, "<i4"),
        _pack(batch.cu_blocks, "<i4"),
        _pack(batch.slot_mapping, "<i8"),
    )


def batch_of(step: RankStep) -> Batch:
    """The batch of a step."""
    return Batch(
        input_ids=np.frombuffer(step.input_ids, "<i4"),
        positions=np.frombuffer(step.positions, "<i4"),
        cu_seqlens_q=np.frombuffer(step.cu_seqlens_q, "<i4"),
        seq_lens=np.frombuffer(step.seq_lens, "<i4"),
        blocks=np.frombuffer(step.blocks, "<i4"),
        cu_blocks=np.frombuffer(step.cu_blocks, "<i4"),
        slot_mapping=np.frombuffer(step.slot_mapping, "<i8"),
        samples=(),
    )


def link_of(peer: RankRegion, way: Route) -> RankLink:
    """A connection to make; the route's source is the peer's layout."""
    return RankLink(peer, way.target, way.head_start, way.head_stop, way.source_slots, way.target_slots)


def route_of(link: RankLink) -> Route:
    """The route of a connection."""
    source = link.peer.layout
    return Route(source, link.target, link.head_start, link.head_stop, link.source_slots, link.target_slots)


def wire_part(part: Part) -> WirePart:
    """Pieces for the wire."""
    agent, pieces = part
    ids = pieces.blocks
    return WirePart(
        agent,
        _pack(pieces.source, "<i8"),
        _pack(pieces.target, "<i8"),
        _pack(pieces.sizes, "<i8"),
        None if ids is None else (_pack(ids[0], "<i4"), _pack(ids[1], "<i4")),
    )


def part_of(wire: WirePart) -> Part:
    """The pieces of a wire part."""
    source, target, sizes = (np.frombuffer(data, "<i8") for data in (wire.source, wire.target, wire.sizes))
    if wire.blocks is None:
        return wire.agent, Pieces(source, target, sizes)
    theirs, ours = (np.frombuffer(data, "<i4") for data in wire.blocks)
    return wire.agent, Pieces(source, target, sizes, (theirs, ours))


def _pack(values: npt.NDArray[Any], dtype: str) -> bytes:
    return values.astype(dtype, copy=False).tobytes()
