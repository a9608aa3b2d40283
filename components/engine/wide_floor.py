"""A Triton kernel that finds the floor of rows of any logits, a program for each: those that `row_floor.py` leaves.

These are rows that are not bfloat16, and all rows where that kernel does not run. The floor is the smallest logit that
min_p, top_k and top_p let pass, found bit by bit. Imported on CUDA hosts only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from components.engine.sampling_math import load_settings, order32

_BITS = tl.constexpr(32)


@triton.jit
def _quick_weights(values, best, factor, lowest):
    """The weights of logits, with a product for the division: masses need no more than that."""
    scaled = (values - best) * factor
    return tl.where((scaled >= lowest) & (values > float("-inf")), tl.exp(scaled), 0.0)


@triton.jit
def _mass_above(row, bound, vocab_size: tl.constexpr, best, temperature, lowest, TILE: tl.constexpr):
    """Weight and number of the tokens whose order is at least `bound`."""
    factor = 1.0 / temperature
    mass = tl.zeros([TILE], tl.float32)
    number = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab_size, TILE):
        at = start + tl.arange(0, TILE)
        values = tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
        weights = _quick_weights(values, best, factor, lowest)
        is_in = (order32(values) >= bound) & (weights > 0)
        mass += tl.where(is_in, weights, 0.0)
        number += is_in.to(tl.int32)
    return tl.sum(mass, axis=0), tl.sum(number, axis=0)


@triton.jit
def _floor_of(row, vocab_size: tl.constexpr, best, temperature, lowest, top_k, top_p, TILE: tl.constexpr):
    """The order of the smallest logit that top_k and then top_p let pass."""
    floor = tl.zeros([], tl.int64)
    if (top_p < 1.0) | (top_k < vocab_size):
        total, number = _mass_above(row, floor, vocab_size, best, temperature, lowest, TILE)
        if top_k < number:
            for bit in range(_BITS):
                tried = floor | (tl.full([], 1, tl.int64) << (_BITS - 1 - bit))
                _, above = _mass_above(row, tried, vocab_size, best, temperature, lowest, TILE)
                floor = tl.where(above >= top_k, tried, floor)
            over, above = _mass_above(row, floor + 1, vocab_size, best, temperature, lowest, TILE)
            upto, count = _mass_above(row, floor, vocab_size, best, temperature, lowest, TILE)
            total = over + (upto - over) * (top_k - above).to(tl.float32) / (count - above).to(tl.float32)
        if top_p < 1.0:
            found = tl.zeros([], tl.int64)
            for bit in range(_BITS):
                tried = found | (tl.full([], 1, tl.int64) << (_BITS - 1 - bit))
                mass, _ = _mass_above(row, tried, vocab_size, best, temperature, lowest, TILE)
                found = tl.where(mass >= top_p * total, tried, found)
            floor = tl.maximum(floor, tl.minimum(found, order32(best)))
    return floor


@triton.jit
def wide_floor_kernel(logits, stride, settings, tokens, floors, vocab_size: tl.constexpr, TILE: tl.constexpr):
    index = tl.program_id(0)
    place, temperature, top_k, top_p, lowest = load_settings(settings, index)
    row = logits + place * stride
    best = tl.load(row + tl.load(tokens + place)).to(tl.float32)
    floor = _floor_of(row, vocab_size, best, temperature, lowest, top_k, top_p, TILE)
    tl.store(floors + index, floor)
