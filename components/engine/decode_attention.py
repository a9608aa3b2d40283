"""A Triton kernel for attention of decode steps: one new token for each sequence, over the blocks of its table.

It takes the joined projections as the product leaves them: scales, norms and rotates the new token's query and key,
and writes key and value into their slot. A program attends for one KV head of one sequence over a part of its
tokens; which part follows from the sequence's position on the GPU, so that a captured step needs no plan. The last
program of a head to end joins the parts. Imported on CUDA hosts only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from components.engine.layer_kernels import rotated, scale_of, scaled

_LOG2_E = tl.constexpr(1.4426950408889634)
_PROGRAMS = 256  # about as many as keep a GPU busy; fewer sequences are attended for in more parts
_FEW_SEQUENCES = 64
_HEAD_ROWS = 16  # the least that a tensor core takes


@triton.jit
def _attend(scores, values, best, total, mixed):
    """The running softmax with some more tokens: scores (rows, tokens) base 2, values (tokens, dims)."""
    highest = tl.maximum(best, tl.max(scores, axis=1))
    faded = tl.exp2(best - highest)
    weights = tl.exp2(scores - highest[:, None])
    mixed = tl.dot(weights.to(values.dtype), values, mixed * faded[:, None])
    return highest, total * faded + tl.sum(weights, axis=1), mixed


@triton.jit
def _capped(scores, scaling, CAP: tl.constexpr):
    scores *= scaling
    if CAP > 0:
        scores = CAP * (1.0 - 2.0 / (tl.exp(2.0 * scores / CAP) + 1.0))
    return scores * _LOG2_E


@triton.jit(do_not_specialize=["layer"])
def _decode_kernel(
    qkv, bias, source, pool, out, sums, marks, arrived, cos, sin, positions, slots, cu_blocks, blocks, q_norm, k_norm,
    norm_eps, eps, layer, scaling, size: tl.constexpr, SIZE_BLOCK: tl.constexpr, NUM_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, IS_SCALED: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    sequence, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + sequence)
    begin = tl.maximum(position - WINDOW + 1, 0) // TOKENS * TOKENS if WINDOW > 0 else 0
    tiles_each = tl.maximum(tl.cdiv(tl.cdiv(position - begin, TOKENS), PARTS), 1)
    num_parts = tl.maximum(tl.cdiv(position - begin, tiles_each * TOKENS), 1)
    if part < num_parts:
        scale = 1.0 if IS_SCALED else scale_of(source + sequence * size, size, eps, SIZE_BLOCK)
        rows = tl.arange(0, ROWS)
        dims = tl.zeros([ROWS, DIM], tl.int32) + tl.arange(0, DIM)[None, :]
        heads = head * GROUP + tl.minimum(rows, GROUP - 1)[:, None]
        token = qkv + sequence * ((GROUP + 2) * KV_HEADS * DIM)
        tables = (cos + position.to(tl.int64) * (DIM // 2), sin + position.to(tl.int64) * (DIM // 2))
        query = rotated(
            token + heads * DIM, scale, bias + heads * DIM, q_norm, tables[0], tables[1], norm_eps, dims, DIM, BIAS, NORM
        ).to(pool.dtype.element_ty)  # fmt: skip
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, DIM], tl.float32)
        table = blocks + tl.load(cu_blocks + sequence)
        first = begin + part * tiles_each * TOKENS
        stop = tl.minimum(first + tiles_each * TOKENS, position)
        along, across = tl.arange(0, TOKENS), tl.arange(0, DIM)
        for start in range(first, stop, TOKENS):
            at = start + along
            is_token = at < stop
            block = tl.load(table + at // BLOCK, mask=is_token, other=0).to(tl.int64)
            piece = ((block * KV_HEADS + head) * NUM_LAYERS + layer) * 2 * BLOCK + at % BLOCK
            keys = tl.load(pool + piece[None, :] * DIM + across[:, None], mask=is_token[None, :], other=0.0)
            scores = _capped(tl.dot(query, keys), scaling, CAP)
            if WINDOW > 0:
                is_token = is_token & (at > position - WINDOW)
            scores = tl.where(is_token[None, :], scores, float("-inf"))
            values = tl.load(
                pool + (piece + BLOCK)[:, None] * DIM + across[None, :], mask=(at < stop)[:, None], other=0.0
            )
            best, total, mixed = _attend(scores, values, best, total, mixed)
        if part == num_parts - 1:  # the new token, which no block needs to be read for
            slot = tl.load(slots + sequence).to(tl.int64)
            piece = (((slot // BLOCK) * KV_HEADS + head) * NUM_LAYERS + layer) * 2 * BLOCK + slot % BLOCK
            of_key, of_value = (GROUP * KV_HEADS + head) * DIM, ((GROUP + 1) * KV_HEADS + head) * DIM
            key = rotated(
                token + of_key, scale, bias + of_key, k_norm, tables[0], tables[1], norm_eps, across, DIM, BIAS, NORM
            ).to(pool.dtype.element_ty)  # fmt: skip
            value = scaled(token + of_value, scale, bias + of_value, across, BIAS).to(pool.dtype.element_ty)
            tl.store(pool + piece * DIM + across, key)
            tl.store(pool + (piece + BLOCK) * DIM + across, value)
            products = query.to(tl.float32) * key.to(tl.float32)[None, :]
            score = _capped(tl.sum(products, axis=1), scaling, CAP)
            highest = tl.maximum(best, score)
            faded, weight = tl.exp2(best - highest), tl.exp2(score - highest)
            mixed = mixed * faded[:, None] + weight[:, None] * value.to(tl.float32)[None, :]
            total = total * faded + weight
            best = highest
        place = sequence * KV_HEADS + head
        ends = out + (place * GROUP + rows[:, None]) * DIM + across[None, :]
        if num_parts == 1:
            tl.store(ends, (mixed / total[:, None]).to(out.dtype.element_ty), mask=(rows < GROUP)[:, None])
        else:
            kept = (place * PARTS + part) * ROWS + rows
            tl.store(sums + kept[:, None] * DIM + across[None, :], mixed)
            tl.store(marks + kept * 2, best)
            tl.store(marks + kept * 2 + 1, total)
            tl.debug_barrier()  # all of it before the program counts as arrived
            if tl.atomic_add(arrived + place, 1, sem="acq_rel") == num_parts - 1:
                tl.store(arrived + place, 0)
                _join(sums, marks, ends, place * PARTS, num_parts, GROUP, ROWS, DIM)


@triton.jit
def _join(sums, marks, ends, first, num_parts, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr):
    """The softmax over all parts from those of each."""
    rows = tl.arange(0, ROWS)
    across = tl.arange(0, DIM)[None, :]
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for part in range(num_parts):
        kept = (first + part) * ROWS + rows
        mark = tl.load(marks + kept * 2, cache_modifier=".cg")
        highest = tl.maximum(best, mark)
        faded, factor = tl.exp2(best - highest), tl.exp2(mark - highest)
        total = total * faded + tl.load(marks + kept * 2 + 1, cache_modifier=".cg") * factor
        added = tl.load(sums + kept[:, None] * DIM + across, cache_modifier=".cg")
        mixed = mixed * faded[:, None] + added * factor[:, None]
        best = highest
    tl.store(ends, (mixed / total[:, None]).to(ends.dtype.element_ty), mask=(rows < GROUP)[:, None])


@dataclass(frozen=True)
class Heads:
    """How a layer attends, beside its weights."""

    num_query_heads: int
    scaling: float
    window: int | None  # keys a query sees, its own included
    softcap: float | None
    norms: tuple[torch.Tensor, torch.Tensor, float] | None  # of queries and keys: weights (head_dim,), and epsilon


@dataclass(frozen=True)
class DecodeTables:
    """Where the sequences of a step stand, all int32 on the device."""

    positions: torch.Tensor  # (S,): of the new token
    slots: torch.Tensor  # (S,): block id * block_size + place in the block, of the new token
    cu_blocks: torch.Tensor  # (S + 1,)
    blocks: torch.Tensor  # (cu_blocks[-1],)


class DecodeAttention:
    """The kernel with one pool, and what the parts of a head leave there for the last one."""

    def __init__(
        self, pool: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], num_query_heads: int, max_sequences: int
    ) -> None:
        """`tables`: cosines and sines, (positions, head_dim / 2) of float32."""
        _, kv_heads, _, _, _, dim = pool.shape
        self._pool = pool
        self._rotary = tables
        self._rows = max(_HEAD_ROWS, triton.next_power_of_2(num_query_heads // kv_heads))
        programs = max(2 * _PROGRAMS, kv_heads)
        like = {"dtype": torch.float32, "device": pool.device}
        self._sums = torch.zeros((programs, self._rows, dim), **like)
        self._marks = torch.zeros((programs, self._rows, 2), **like)
        self._arrived = torch.zeros(max_sequences * kv_heads, dtype=torch.int32, device=pool.device)

    def attend(
        self,
        qkv: torch.Tensor,
        bias: torch.Tensor | None,
        layer: int,
        heads: Heads,
        step: DecodeTables,
        *,
        source: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Attends with the new tokens, writes their keys and values: (S, query heads * head_dim).

        `qkv` (S, (query heads + 2 kv heads) * head_dim): joined projections, to be scaled by what `source`, (S, size),
        is to be normed by, unless it is None, and added to `bias`.
        """
        _, kv_heads, num_layers, _, block_size, dim = self._pool.shape
        sequences = len(qkv)
        out = torch.empty((sequences, heads.num_query_heads * dim), dtype=qkv.dtype, device=qkv.device)
        size = 1 if source is None else source.shape[1]
        q_norm, k_norm, norm_eps = heads.norms or (qkv, qkv, 0.0)
        num_parts = self._num_parts(sequences, kv_heads)
        _decode_kernel[(sequences, kv_heads, num_parts)](
            qkv, qkv if bias is None else bias, qkv if source is None else source, self._pool, out, self._sums,
            self._marks, self._arrived, *self._rotary, step.positions, step.slots, step.cu_blocks, step.blocks, q_norm,
            k_norm, norm_eps, eps, layer, heads.scaling, size, SIZE_BLOCK=triton.next_power_of_2(size),
            NUM_LAYERS=num_layers, KV_HEADS=kv_heads, GROUP=heads.num_query_heads // kv_heads, ROWS=self._rows, DIM=dim,
            BLOCK=block_size, TOKENS=128 if sequences < _FEW_SEQUENCES and dim <= 128 else 64, PARTS=num_parts,
            WINDOW=heads.window or 0, CAP=heads.softcap or 0.0, IS_SCALED=source is None, BIAS=bias is not None,
            NORM=heads.norms is not None, num_warps=4, num_stages=2,
        )  # fmt: skip
        return out

    def _num_parts(self, sequences: int, kv_heads: int) -> int:
        """A power of two that makes about as many programs as keep the GPU busy; one where sequences do."""
        return int(triton.next_power_of_2(max(1, _PROGRAMS // (sequences * kv_heads))))
