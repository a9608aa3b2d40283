"""The plan of a READ: which bytes of one rank's region go where in another's.

Pure. A region is [block][kv_head][layer][K, V][token][head_dim], so the heads one rank needs of
another rank's block lie together: with equal block sizes every block is one piece, whatever the
tensor-parallel degrees. With unequal sizes a run of tokens that lies in one block on both sides
gives one piece per head, layer and K or V.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from components.kv.layout import ITEM_BYTES, block_bytes, head_bytes
from components.messages import KVLayout
from graph import GraphError
from graph.words import counted

Offsets = npt.NDArray[np.int64]
BlockIds = npt.NDArray[np.int32]


class LayoutMismatch(GraphError):
    """Two KV layouts between which no plan exists; the message names both values."""


class Slots(msgspec.Struct, frozen=True):
    """Equal pieces at equal distances in a region: `length` bytes at `offset` of each of its blocks."""

    offset: int
    length: int
    stride: int


class Route(msgspec.Struct, frozen=True):
    """The heads [head_start, head_stop) that go from a source layout to a target layout.

    `source_slots` and `target_slots` stand if the block sizes are equal: then a piece is a block.
    """

    source: KVLayout
    target: KVLayout
    head_start: int
    head_stop: int
    source_slots: Slots | None = None
    target_slots: Slots | None = None

    @property
    def is_blockwise(self) -> bool:
        """Whether one descriptor moves one block."""
        return self.source_slots is not None


class Pieces(msgspec.Struct, frozen=True, eq=False):
    """Bytes to move: `sizes[i]` bytes from `source[i]` to `target[i]`, offsets from the regions' starts.

    With a blockwise route each piece is a whole slot, and `blocks` names the slots on both sides.
    """

    source: Offsets  # (n,)
    target: Offsets  # (n,)
    sizes: Offsets  # (n,)
    blocks: tuple[BlockIds, BlockIds] | None = None

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())


class Side(msgspec.Struct, frozen=True):
    """One side's blocks of a sequence: `block_ids[0]` holds the tokens from `first_token` on."""

    block_ids: Sequence[int]
    first_token: int


def check_layouts(source: KVLayout, target: KVLayout) -> None:
    """Raises `LayoutMismatch` unless a plan exists from `source` to `target`."""
    for field in ("version", "model", "dtype", "num_layers", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(target, field), getattr(source, field)
        if ours != theirs:
            raise LayoutMismatch(f"KV layouts differ: {field} is {theirs!r} at the source and {ours!r} at the target")
    small, large = sorted((source.block_size, target.block_size))
    if large % small:
        raise LayoutMismatch(
            f"KV layouts differ: block_size is {source.block_size} at the source and {target.block_size} at the "
            "target; one must be a multiple of the other"
        )
    if source.dtype not in ITEM_BYTES:
        raise LayoutMismatch(f"KV dtype {source.dtype!r} is unknown; it must be one of {', '.join(ITEM_BYTES)}")


def route(source: KVLayout, target: KVLayout, *, head_start: int | None = None, head_stop: int | None = None) -> Route:
    """The route for the heads that both ranks hold, or for the given part of them.

    Raises `LayoutMismatch` if there is no plan between the layouts or no head in common.
    """
    check_layouts(source, target)
    start = max(source.head_start, target.head_start) if head_start is None else head_start
    stop = min(source.head_stop, target.head_stop) if head_stop is None else head_stop
    if start >= stop:
        raise LayoutMismatch(
            f"no KV head in common: the source holds [{source.head_start}, {source.head_stop}), "
            f"the target [{target.head_start}, {target.head_stop})"
        )
    if source.block_size != target.block_size:
        return Route(source, target, start, stop)
    return Route(source, target, start, stop, _slots(source, start, stop), _slots(target, start, stop))


def cover(sources: Sequence[KVLayout], target: KVLayout) -> list[tuple[int, Route]]:
    """For each source rank that `target` reads from, its index and the route; every head exactly once.

    Ranks that hold the same (replicated) heads are not read twice. Raises `LayoutMismatch` for a
    head that no source holds.
    """
    routes = []
    head = target.head_start
    while head < target.head_stop:
        index = next((i for i, s in enumerate(sources) if s.head_start <= head < s.head_stop), None)
        if index is None:
            raise LayoutMismatch(f"no source rank holds KV head {head} of {target.num_kv_heads}")
        stop = min(sources[index].head_stop, target.head_stop)
        routes.append((index, route(sources[index], target, head_start=head, head_stop=stop)))
        head = stop
    return routes


def plan(way: Route, source: Side, target: Side, *, start: int, stop: int) -> Pieces:
    """The pieces that bring the KV of tokens [start, stop) from `source` to `target`."""
    source_block, source_token, target_block, target_token, length = _runs(way, source, target, start, stop)
    is_whole = np.all(length == way.source.block_size)
    if way.source_slots is not None and way.target_slots is not None and is_whole:
        size = np.full(len(length), way.source_slots.length, np.int64)
        return Pieces(
            source_block * way.source_slots.stride + way.source_slots.offset,
            target_block * way.target_slots.stride + way.target_slots.offset,
            size,
            (source_block.astype(np.int32), target_block.astype(np.int32)),
        )
    starts = _expand(way, way.source, source_block, source_token), _expand(way, way.target, target_block, target_token)
    pieces = way.head_stop - way.head_start, way.source.num_layers * 2
    sizes = np.repeat(length * way.source.head_dim * ITEM_BYTES[way.source.dtype], pieces[0] * pieces[1])
    return _merge(*starts, sizes)


def whole_blocks(way: Route, stop: int) -> int:
    """`stop`, rounded up to a block's end where that makes the last piece a whole block.

    What lies beyond `stop` in the last block is no one's: both sides write it before they read it.
    """
    size = way.target.block_size
    return -(-stop // size) * size if way.is_blockwise else stop


def _slots(layout: KVLayout, start: int, stop: int) -> Slots:
    head = head_bytes(layout)
    return Slots((start - layout.head_start) * head, (stop - start) * head, block_bytes(layout))


def _runs(way: Route, source: Side, target: Side, start: int, stop: int) -> tuple[Offsets, ...]:
    """[start, stop) cut where a block ends on either side: block, token in block (both sides), length."""
    size = min(way.source.block_size, way.target.block_size)
    cuts = np.arange(start // size * size + size, stop, size, dtype=np.int64)
    begins = np.concatenate(([start], cuts)).astype(np.int64) if stop > start else np.empty(0, np.int64)
    length = np.diff(np.append(begins, stop)) if stop > start else begins
    return *_place(way.source, source, begins), *_place(way.target, target, begins), length


def _place(layout: KVLayout, side: Side, tokens: Offsets) -> tuple[Offsets, Offsets]:
    """Block id, and offset within the block, of each token."""
    index, token = np.divmod(tokens - side.first_token, layout.block_size)
    if len(index) and (index[0] < 0 or index[-1] >= len(side.block_ids)):
        raise ValueError(
            f"tokens {tokens[0]} to {tokens[-1]} do not lie in {counted(len(side.block_ids), 'block')} "
            f"from {side.first_token} on"
        )
    return np.asarray(side.block_ids, np.int64)[index], token


def _expand(way: Route, layout: KVLayout, block: Offsets, token: Offsets) -> Offsets:
    """The start of each (run, head, layer, K or V) in the region, in that order, flat."""
    row = layout.head_dim * ITEM_BYTES[layout.dtype]
    base = block * block_bytes(layout) + token * row
    heads = np.arange(way.head_start, way.head_stop, dtype=np.int64) - layout.head_start
    planes = np.arange(layout.num_layers * 2, dtype=np.int64) * (layout.block_size * row)
    starts: Offsets = (base[:, None, None] + (heads * head_bytes(layout))[:, None] + planes).reshape(-1)
    return starts


def _merge(source: Offsets, target: Offsets, sizes: Offsets) -> Pieces:
    """Joins pieces that follow each other on both sides."""
    if not len(sizes):
        return Pieces(source, target, sizes)
    is_next = (source[1:] == source[:-1] + sizes[:-1]) & (target[1:] == target[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~is_next)))
    return Pieces(source[first], target[first], np.add.reduceat(sizes, first))
