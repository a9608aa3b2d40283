"""Paged attention: the seam between the model and the KV pool, and its torch back end.

    attention = SdpaAttention(pool)      one per runner
    step = attention.plan(batch)         once per step: indices and masks, for all layers
    step.write(layer, keys, values)      in every layer: the new tokens' KV into their slots
    step.attend(layer, queries, ...)     in every layer: over each sequence's blocks

Sequences with one new token are gathered in a few padded groups of similar length and computed
together; longer chunks are computed one by one. Heads are grouped: the query heads of one KV head
share its gathered keys and values.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from components.engine.runner import Batch, KVRegion
from components.kv.layout import block_bytes, block_shape
from components.messages import KVLayout

_Indices = npt.NDArray[np.int64]
_GROUP_OVERHEAD_BLOCKS = 48  # a further group costs about as much as gathering this many blocks
_QUERY_TILE = 32  # torch's memory-efficient kernels take 32 or 64 queries at a time


class Shape(msgspec.Struct, frozen=True):
    """How a layer attends: the factor on the scores, and what some models add."""

    scaling: float
    sliding_window: int | None = None  # keys a query sees, its own included
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # (query_heads,): a logit that takes part in the softmax and has no value


class PagedStep(Protocol):
    """One step's attention; every layer calls `write`, then `attend`."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts the new tokens' keys and values, (tokens, kv_heads, head_dim), into their slots."""

    def attend(self, layer: int, queries: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Attends with `queries`, (tokens, query_heads, head_dim), over what is written; returns the same shape."""


class Attention(Protocol):
    """A back end: plans steps over one pool."""

    def plan(self, batch: Batch) -> PagedStep:
        """Everything about the step that the layers share."""


class KVPool:
    """A rank's KV blocks: one allocation, [block][kv_head][layer][K, V][token][head_dim], zeros at first.

    Host memory is an anonymous mapping, whose pages appear as they are first written: a large pool
    costs nothing at start, while `torch.zeros` would write all of it.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device, *, num_spare: int = 0) -> None:
        """Behind the blocks that sequences get lie `num_spare` more, for whatever must be written somewhere."""
        self.layout = layout
        self.num_blocks = num_blocks
        # One block more, which is no sequence's: transfers test themselves on it.
        shape, dtype = (num_blocks + num_spare + 1, *block_shape(layout)), getattr(torch, layout.dtype)
        if device.type == "cpu":
            pages = mmap.mmap(-1, shape[0] * block_bytes(layout))
            self.blocks = torch.frombuffer(pages, dtype=dtype).view(shape)  # keeps the mapping alive
        else:
            self.blocks = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def region(self) -> KVRegion:
        """Where the blocks lie."""
        device = self.blocks.device
        memory = "DRAM" if device.type == "cpu" else "VRAM"
        num_blocks = len(self.blocks)
        return KVRegion(self.blocks.data_ptr(), num_blocks, block_bytes(self.layout), memory, device.index or 0)


def decode_groups(num_blocks: Sequence[int], overhead: int = _GROUP_OVERHEAD_BLOCKS) -> list[list[int]]:
    """Splits sequences into groups that are padded to their longest member.

    Sorted by length, a group is closed as soon as padding the next sequence costs more blocks than
    `overhead`, which stands for the fixed cost of another group. Returns lists of positions.
    """
    order = sorted(range(len(num_blocks)), key=lambda i: -num_blocks[i])
    groups: list[list[int]] = []
    padding = 0
    for i in order:
        waste = num_blocks[groups[-1][0]] - num_blocks[i] if groups else 0
        if not groups or padding + waste > overhead:
            groups.append([])
            padding = waste = 0
        groups[-1].append(i)
        padding += waste
    return groups


class SdpaAttention:
    """The torch back end, for the CPU and any device."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def plan(self, batch: Batch) -> _SdpaStep:
        """Computes slots, gather indices and masks of the step."""
        lengths = np.diff(batch.cu_seqlens_q)
        decoding = [i for i in range(batch.num_sequences) if lengths[i] == 1]
        sizes = np.diff(batch.cu_blocks)[decoding].tolist()
        groups = [[decoding[i] for i in group] for group in decode_groups(sizes)]
        chunks = [i for i in range(batch.num_sequences) if lengths[i] > 1]
        parts = [_gather_decodes(batch, group, self._pool) for group in groups]
        parts += [_gather_chunk(batch, i, self._pool) for i in chunks]
        return _SdpaStep(self._pool, _write_rows(batch.slot_mapping, self._pool), parts)


class _Part:
    """Sequences attended together: S of them with Q new tokens each, padded to N keys."""

    def __init__(
        self, pool: KVPool, tokens: _Indices, tables: _Indices, seq_lens: _Indices, positions: _Indices
    ) -> None:
        """`tokens` and `positions` (S, Q): rows of the batch; `tables` (S, blocks); `seq_lens` (S,)."""
        device = pool.blocks.device
        layout = pool.layout
        heads = self._heads = layout.head_stop - layout.head_start
        self.num_sequences, self.num_queries = tokens.shape
        self.num_keys = tables.shape[1] * layout.block_size
        self.tokens = torch.from_numpy(tokens.reshape(-1)).to(device)
        # Rows of block_size * head_dim elements, all keys first: (K and V, sequence, head, block) of layer 0
        rows = (tables[:, None, :] * heads + np.arange(heads)[:, None]) * layout.num_layers * 2
        self.rows = torch.from_numpy(np.stack((rows, rows + 1)).reshape(-1)).to(device)
        self.stale = torch.from_numpy(_stale_rows(seq_lens, self.num_keys, heads)).to(device)
        self._positions = torch.from_numpy(positions).to(device)
        self._seq_lens = seq_lens
        self._biases: dict[int | None, torch.Tensor] = {}

    def bias(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """0 where a query sees a key, -inf elsewhere: (S * heads, 1, Q, N). Made once for all layers alike."""
        if sliding_window not in self._biases:
            self._biases[sliding_window] = self._make_bias(sliding_window, dtype)
        return self._biases[sliding_window]

    def _make_bias(self, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        keys = torch.arange(self.num_keys, device=self._positions.device)
        queries = self._positions[:, None, :, None]
        seen = keys <= queries
        if sliding_window is not None:
            seen &= keys > queries - sliding_window
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        # Copies for decodes, a few numbers per sequence; a chunk is alone in its part and only expands.
        return bias.expand(-1, self._heads, -1, -1).reshape(-1, 1, *bias.shape[2:])


def _gather_decodes(batch: Batch, sequences: list[int], pool: KVPool) -> _Part:
    longest = np.diff(batch.cu_blocks)[sequences].max()
    tables = np.empty((len(sequences), longest), np.int64)
    for row, i in enumerate(sequences):
        table = batch.table(i)
        tables[row, : len(table)] = table
        tables[row, len(table) :] = table[0]
    tokens = batch.cu_seqlens_q[sequences].astype(np.int64)[:, None]
    lengths = batch.seq_lens[sequences].astype(np.int64)
    return _Part(pool, tokens, tables, lengths, lengths[:, None] - 1)


def _gather_chunk(batch: Batch, i: int, pool: KVPool) -> _Part:
    start, stop = (int(t) for t in batch.cu_seqlens_q[i : i + 2])
    tokens = np.arange(start, stop, dtype=np.int64)[None]
    length = batch.seq_lens[i : i + 1].astype(np.int64)
    positions = np.arange(length[0] - (stop - start), length[0], dtype=np.int64)[None]
    return _Part(pool, tokens, batch.table(i).astype(np.int64)[None], length, positions)


def _stale_rows(seq_lens: _Indices, num_keys: int, heads: int) -> _Indices:
    """Rows of gathered keys and values, (2, S, heads, keys), that hold nothing of the sequence.

    They are masked, but what an earlier owner left there may be infinite, and 0 * inf is not 0.
    """
    stale = np.arange(num_keys) >= seq_lens[:, None]
    grid = np.broadcast_to(stale[None, :, None, :], (2, len(seq_lens), heads, num_keys))
    return np.flatnonzero(grid)


def _write_rows(slots: _Indices, pool: KVPool) -> torch.Tensor:
    """Rows of head_dim elements of layer 0 for each new token: (tokens * K and V * heads,)."""
    layout = pool.layout
    heads = layout.head_stop - layout.head_start
    block, offset = np.divmod(slots, layout.block_size)
    head = (block[:, None] * heads + np.arange(heads)) * layout.num_layers * 2  # (tokens, heads)
    sides = head[:, None, :] + np.arange(2)[:, None]  # (tokens, K and V, heads)
    rows = sides * layout.block_size + offset[:, None, None]
    return torch.from_numpy(rows.reshape(-1)).to(pool.blocks.device)


class _SdpaStep:
    def __init__(self, pool: KVPool, write_rows: torch.Tensor, parts: list[_Part]) -> None:
        layout = pool.layout
        self._heads = layout.head_stop - layout.head_start
        self._head_dim = layout.head_dim
        self._write_stride = 2 * layout.block_size
        self._write_rows = write_rows
        self._parts = parts
        self._slots = pool.blocks.view(-1, layout.head_dim)
        self._rows = pool.blocks.view(-1, layout.block_size * layout.head_dim)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        kv = torch.stack((keys, values), 1).to(self._slots.dtype)  # (tokens, K and V, heads, head_dim)
        self._slots.index_copy_(0, self._write_rows + layer * self._write_stride, kv.view(-1, self._head_dim))

    def attend(self, layer: int, queries: torch.Tensor, shape: Shape) -> torch.Tensor:
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for part in self._parts:
            keys, values = self._gather(layer, part, queries.dtype)
            taken = queries.index_select(0, part.tokens)
            # (S, Q, heads, group, head_dim) -> (S * heads, group, Q, head_dim)
            split = taken.view(part.num_sequences, part.num_queries, self._heads, -1, self._head_dim)
            grouped = split.permute(0, 2, 3, 1, 4).reshape(-1, split.shape[3], part.num_queries, self._head_dim)
            bias = part.bias(shape.sliding_window, queries.dtype)
            result = _attend(grouped, keys, values, bias, shape).view(
                part.num_sequences, self._heads, *grouped.shape[1:]
            )
            out.index_copy_(0, part.tokens, result.permute(0, 3, 1, 2, 4).reshape(taken.shape))
        return out

    def _gather(self, layer: int, part: _Part, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a part, each (S * heads, keys, head_dim), stale rows zeroed."""
        gathered = self._rows.index_select(0, part.rows + 2 * layer).to(dtype)
        gathered.view(-1, self._head_dim).index_fill_(0, part.stale, 0)
        keys, values = gathered.view(2, part.num_sequences * self._heads, part.num_keys, self._head_dim)
        return keys, values


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, shape: Shape
) -> torch.Tensor:
    """Queries (B, G, Q, D), keys and values (B, N, D), bias (B, 1, Q, N), where B counts KV heads of sequences."""
    batch, group, num_queries, head_dim = queries.shape
    if num_queries == 1 or shape.softcap is not None or shape.sinks is not None:
        return _attend_plainly(queries, keys, values, bias, shape)
    if num_queries % _QUERY_TILE == 1 and queries.is_cuda:
        return _attend_last_apart(queries, keys, values, bias, shape)
    # The query heads of a KV head stand as the heads of one batch entry: expanding is free, repeating is not.
    spread = (batch, group, keys.shape[1], head_dim)
    return F.scaled_dot_product_attention(
        queries,
        keys.unsqueeze(1).expand(spread),
        values.unsqueeze(1).expand(spread),
        attn_mask=bias,
        scale=shape.scaling,
    )


def _attend_last_apart(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, shape: Shape
) -> torch.Tensor:
    """The same, with the last query on its own.

    Where a tile of torch's memory-efficient kernel is left with one query and the heads share their keys (stride 0),
    it takes the heads for queries and reads a row of the mask for each of them, all but the first from behind its
    end (pytorch/pytorch#191937; seen in 2.11). Whatever lies there is added to the scores.
    """
    first = _attend(queries[:, :, :-1], keys, values, bias[:, :, :-1], shape)
    last = _attend_plainly(queries[:, :, -1:], keys, values, bias[:, :, -1:], shape)
    return torch.cat((first, last), dim=2)


def _attend_plainly(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, shape: Shape
) -> torch.Tensor:
    """The same with the scores in hand: quickest for single queries, and where they are capped or joined by sinks."""
    batch, group, num_queries, head_dim = queries.shape
    flat, transposed = queries.reshape(batch, group * num_queries, head_dim), keys.transpose(1, 2)
    if num_queries == 1 and shape.softcap is None:
        scores = torch.baddbmm(bias[:, 0], flat, transposed, alpha=shape.scaling)
    else:
        scores = torch.bmm(flat, transposed).mul_(shape.scaling)
        if shape.softcap is not None:
            scores = scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
        scores.view(batch, group, num_queries, -1).add_(bias)
    if shape.sinks is not None:
        heads = shape.sinks.numel() // group
        sinks = shape.sinks.to(scores.dtype).view(1, heads, group, 1, 1)
        sinks = sinks.expand(batch // heads, -1, -1, num_queries, -1).reshape(batch, group * num_queries, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., : keys.shape[1]]
    return torch.bmm(weights.to(values.dtype), values).view(batch, group, num_queries, head_dim)
