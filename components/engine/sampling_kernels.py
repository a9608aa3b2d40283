"""Triton kernels of sampling: the algorithm and its order are those of `sampling.py`.

Each wrapper below a kernel says what it computes; all arithmetic is float32, whatever the tensors' dtype.
Imported on CUDA hosts only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BUCKET = 64  # as in sampling.py
_TILE = 16384
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_MIX_2 = tl.constexpr(0x94D049BB133111EB - (1 << 64))


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
