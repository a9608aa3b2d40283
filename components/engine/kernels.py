"""Triton kernels of the CUDA engine: norms, rotary with the KV write, gated activation, sampling.

Each wrapper below a kernel says what it computes; all arithmetic is float32, whatever the tensors' dtype.
Imported on CUDA hosts only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS_PER_PROGRAM = 8
_BUCKET = 64  # as in sampling.py
_TILE = 16384
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit
def _rms_norm_kernel(x, residual, weight, out, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    values = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, (values * scale * factors).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm of x, (tokens, size); with `residual`, x is added to it in place first and the sum is normed."""
    tokens, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    target = x if residual is None else residual
    _rms_norm_kernel[(tokens,)](
        x,
        target,
        weight,
        out,
        size,
        eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
    )
    return out


@triton.jit
def _rotary_write_kernel(
    qkv, queries, pool, cos, sin, positions, slots, q_norm, k_norm, eps, layer, num_layers, block_size,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, HALF)
    total: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    dim: tl.constexpr = 2 * HALF
    valid = (heads < total)[:, None] & (at < HALF)[None, :]
    is_query = (heads < Q_HEADS)[:, None]
    is_value = (heads >= Q_HEADS + KV_HEADS)[:, None]
    source = qkv + token * total * dim + heads[:, None] * dim + at[None, :]
    first = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=valid, other=0.0).to(tl.float32)
    plain_first, plain_second = first, second
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1) / dim
        scale = (1.0 / tl.sqrt(squares + eps))[:, None]
        of_query = is_query & (at < HALF)[None, :]
        other = (heads >= Q_HEADS)[:, None] & (at < HALF)[None, :]
        places = tl.zeros([HEADS, HALF], tl.int32) + at[None, :]
        factor_1 = tl.load(q_norm + places, mask=of_query, other=0.0).to(tl.float32)
        factor_1 += tl.load(k_norm + places, mask=other, other=0.0).to(tl.float32)
        factor_2 = tl.load(q_norm + places + HALF, mask=of_query, other=0.0).to(tl.float32)
        factor_2 += tl.load(k_norm + places + HALF, mask=other, other=0.0).to(tl.float32)
        first = first * scale * factor_1
        second = second * scale * factor_2
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * HALF + at)[None, :]
    s = tl.load(sin + position * HALF + at)[None, :]
    turned_first = tl.where(is_value, plain_first, first * c - second * s)
    turned_second = tl.where(is_value, plain_second, second * c + first * s)
    out = queries + token * Q_HEADS * dim + heads[:, None] * dim + at[None, :]
    tl.store(out, turned_first.to(queries.dtype.element_ty), mask=valid & is_query)
    tl.store(out + HALF, turned_second.to(queries.dtype.element_ty), mask=valid & is_query)
    slot = tl.load(slots + token).to(tl.int64)
    side = tl.where(heads >= Q_HEADS + KV_HEADS, 1, 0)
    head = heads - Q_HEADS - side * KV_HEADS
    piece = (((slot // block_size) * KV_HEADS + head) * num_layers + layer) * 2 + side
    kept = pool + ((piece * block_size + slot % block_size) * dim)[:, None] + at[None, :]
    tl.store(kept, turned_first.to(pool.dtype.element_ty), mask=valid & (heads >= Q_HEADS)[:, None])
    tl.store(kept + HALF, turned_second.to(pool.dtype.element_ty), mask=valid & (heads >= Q_HEADS)[:, None])


def rotary_write(
    qkv: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_query_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    """Norms and rotates queries and keys of joined projections, writes keys and values into their slots.

    `qkv` (tokens, (query heads + 2 kv heads) * head_dim), `pool` the blocks of the KV layout, `tables`
    cosines and sines, (positions, head_dim / 2) of float32. Returns the queries, (tokens, heads, head_dim).
    """
    _, kv_heads, num_layers, _, block_size, dim = pool.shape
    tokens = qkv.shape[0]
    queries = torch.empty((tokens, num_query_heads, dim), dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm, eps = norms if norms is not None else (qkv, qkv, 0.0)
    grid = (tokens, triton.cdiv(num_query_heads + 2 * kv_heads, _HEADS_PER_PROGRAM))
    _rotary_write_kernel[grid](
        qkv, queries, pool, tables[0], tables[1], positions, slots, q_norm, k_norm, eps, layer, num_layers, block_size,
        Q_HEADS=num_query_heads, KV_HEADS=kv_heads, HALF=dim // 2, HEADS=_HEADS_PER_PROGRAM, NORM=norms is not None,
        num_warps=2,
    )  # fmt: skip
    return queries


@triton.jit
def _silu_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of the joined (tokens, 2 * size): (tokens, size)."""
    tokens, double = gate_up.shape
    size = double // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _silu_mul_kernel[(tokens, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block, num_warps=4)
    return out


# --- sampling; the algorithm and its order are those of sampling.py


@triton.jit
def _order(values, BITS: tl.constexpr):
    """Unsigned integers that compare as the floats do; of bfloat16 the upper 16 bits say everything."""
    raw = values.to(tl.int32, bitcast=True)
    mask = tl.where(raw < 0, -1, -2147483648)
    ordered = (raw ^ mask).to(tl.uint32, bitcast=True).to(tl.int64)
    return ordered >> (32 - BITS)


@triton.jit
def _mix64(words):
    words = (words ^ ((words >> 30) & ((1 << 34) - 1))) * _MIX_1
    words = (words ^ ((words >> 27) & ((1 << 37) - 1))) * _MIX_2
    return words ^ ((words >> 31) & ((1 << 33) - 1))


@triton.jit
def _gumbel64(key, places):
    words = _mix64(key + (places + 1).to(tl.int64) * _GOLDEN)
    uniform = (((words >> 12) & ((1 << 52) - 1)).to(tl.float64) + 0.5) * (1.0 / (1 << 52))
    return -tl.log(-tl.log(uniform))


@triton.jit
def _scale(values, best, temperature):
    scaled = tl.maximum(tl.div_rn(values - best, temperature), -1e30)
    return tl.where(values == float("-inf"), float("-inf"), scaled)


@triton.jit
def _weights(row, at, vocab_size, best, temperature, lowest):
    values = tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    scaled = _scale(values, best, temperature)
    return values, tl.where((scaled >= lowest) & (at < vocab_size), tl.exp(scaled), 0.0)


@triton.jit
def _quick_weights(row, at, vocab_size, best, factor, lowest):
    """As `_weights`, with a product for the division: masses need no more than that."""
    values = tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    scaled = (values - best) * factor
    return values, tl.where((scaled >= lowest) & (at < vocab_size), tl.exp(scaled), 0.0)


@triton.jit
def _mass_above(
    row, bound, vocab_size: tl.constexpr, best, temperature, lowest, BITS: tl.constexpr, TILE: tl.constexpr
):
    """Weight and number of the tokens whose order is at least `bound`."""
    factor = 1.0 / temperature
    mass = tl.zeros([TILE], tl.float32)
    number = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        values, weights = _quick_weights(row, at, vocab_size, best, factor, lowest)
        is_in = (_order(values, BITS) >= bound) & (weights > 0)
        mass += tl.where(is_in, weights, 0.0)
        number += is_in.to(tl.int32)
    return tl.sum(mass, axis=0), tl.sum(number, axis=0)


@triton.jit
def _floor(
    row, vocab_size: tl.constexpr, best, temperature, lowest, top_k, top_p, BITS: tl.constexpr, TILE: tl.constexpr
):
    """The order of the smallest logit that top_k and then top_p let pass."""
    floor = tl.zeros([], tl.int64)
    if (top_p < 1.0) | (top_k < vocab_size):
        total, number = _mass_above(row, floor, vocab_size, best, temperature, lowest, BITS, TILE)
        if top_k < number:
            for bit in range(BITS):
                tried = floor | (tl.full([], 1, tl.int64) << (BITS - 1 - bit))
                _, above = _mass_above(row, tried, vocab_size, best, temperature, lowest, BITS, TILE)
                floor = tl.where(above >= top_k, tried, floor)
            over, above = _mass_above(row, floor + 1, vocab_size, best, temperature, lowest, BITS, TILE)
            upto, count = _mass_above(row, floor, vocab_size, best, temperature, lowest, BITS, TILE)
            total = over + (upto - over) * (top_k - above).to(tl.float32) / (count - above).to(tl.float32)
        if top_p < 1.0:
            found = tl.zeros([], tl.int64)
            for bit in range(BITS):
                tried = found | (tl.full([], 1, tl.int64) << (BITS - 1 - bit))
                mass, _ = _mass_above(row, tried, vocab_size, best, temperature, lowest, BITS, TILE)
                found = tl.where(mass >= top_p * total, tried, found)
            top = _order(best, BITS)
            floor = tl.maximum(floor, tl.minimum(found, top))
    return floor


@triton.jit
def _draw_kernel(
    logits,
    stride,
    settings,
    tokens,
    vocab_size: tl.constexpr,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    BUCKET: tl.constexpr,
):
    index = tl.program_id(0)
    mine = settings + index * 7
    place = tl.load(mine + 6)
    row = logits + place * stride
    temperature = tl.load(mine + 3).to(tl.float64, bitcast=True).to(tl.float32)
    top_p = tl.load(mine + 4).to(tl.float64, bitcast=True).to(tl.float32)
    lowest = tl.load(mine + 5).to(tl.float64, bitcast=True).to(tl.float32)
    top_k = tl.load(mine + 2)
    best_of = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        best_of = tl.maximum(best_of, tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32))
    best = tl.max(best_of, axis=0)
    floor = _floor(row, vocab_size, best, temperature, lowest, top_k, top_p, BITS, TILE)
    buckets: tl.constexpr = TILE // BUCKET
    best_score = tl.full([], float("-inf"), tl.float64)
    chosen = tl.zeros([], tl.int32)
    key = tl.load(mine)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, buckets)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
        values, weights = _weights(row, at, vocab_size, best, temperature, lowest)
        weights = tl.where(_order(values, BITS) >= floor, weights, 0.0)
        sums = tl.sum(weights.to(tl.float64), axis=1)
        number = start // BUCKET + tl.arange(0, buckets)
        scores = tl.where(sums > 0, tl.log(sums) + _gumbel64(key, number), float("-inf"))
        highest = tl.max(scores, axis=0)
        where = start // BUCKET + tl.argmax(scores, axis=0)
        chosen = tl.where(highest > best_score, where, chosen)
        best_score = tl.maximum(highest, best_score)
    at = chosen * BUCKET + tl.arange(0, BUCKET)
    values, weights = _weights(row, at, vocab_size, best, temperature, lowest)
    is_in = (_order(values, BITS) >= floor) & (weights > 0)
    scores = _scale(values, best, temperature).to(tl.float64) + _gumbel64(tl.load(mine + 1), tl.arange(0, BUCKET))
    token = chosen * BUCKET + tl.argmax(tl.where(is_in, scores, float("-inf")), axis=0)
    tl.store(tokens + place, token.to(tl.int64))


def draw(logits: torch.Tensor, settings: torch.Tensor, tokens: torch.Tensor, *, tile: int = _TILE) -> None:
    """Draws a token for some rows of `logits`, (rows, vocabulary), into their places in `tokens`, (rows,) of int64.

    `settings` (drawn, 7) of int64: the keys of both stages, top_k (the vocabulary's size where unset), then
    the bits of float64 temperature, top_p and the logarithm of min_p, and the row.
    """
    bits = 16 if logits.dtype is torch.bfloat16 else 32
    _draw_kernel[(len(settings),)](
        logits, logits.stride(0), settings, tokens, logits.shape[1], BITS=bits, TILE=tile, BUCKET=_BUCKET, num_warps=32
    )


@triton.jit
def _argmax_kernel(logits, best, where, size, parts, PART: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    values = tl.load(logits + row * size + at, mask=at < size, other=float("-inf")).to(tl.float32)
    tl.store(best + row * parts + part, tl.max(values, axis=0))
    tl.store(where + row * parts + part, part * PART + tl.argmax(values, axis=0))


@triton.jit
def _argmax_join_kernel(best, where, tokens, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PARTS)
    values = tl.load(best + row * parts + at, mask=at < parts, other=float("-inf"))
    tl.store(tokens + row, tl.load(where + row * parts + tl.argmax(values, axis=0)).to(tl.int64))


def argmax(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """The first of the largest of each row of contiguous `logits`, (rows, vocabulary), into `tokens`, (rows,)."""
    rows, size = logits.shape
    parts = triton.cdiv(size, 4096)
    best = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _argmax_kernel[(rows, parts)](logits, best, where, size, parts, PART=4096, num_warps=4)
    _argmax_join_kernel[(rows,)](best, where, tokens, parts, PARTS=triton.next_power_of_2(parts), num_warps=1)
