"""Triton kernels that find the floor of rows of bfloat16 logits: the smallest that min_p, top_k and top_p let pass.

    survey   parts of a row: weight and number of the tokens above some bounds below the best one
    count    parts: how often each value occurs between the two bounds that the floor lies between
    floor    rows: walks these counts downwards to the floor

A bfloat16 has 65,536 values at most, so integers counted atomically, whose order does not matter, tell
all about a row; the bounds keep them few. Imported on CUDA hosts only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from components.engine.sampling_math import load_settings, order16, quick_weights, value16

NUM_VALUES = tl.constexpr(1 << 16)
SLOTS = tl.constexpr(16)  # of the bounds; those behind the last bound stand for everything
_BOUNDS = tl.constexpr(10)
_EVERYTHING = tl.constexpr(256.0)  # steps below the best, where no weight is left


@triton.jit
def _bound(best, temperature, slot):
    """A value below the best one: so many steps of a power of two, temperature / 2 to temperature.

    That makes the product exact, so that all programs of a row find the same bounds.
    """
    step = (temperature.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    steps = (slot + 1) * (slot + 8) * 0.125  # 1, 2.25, 3.75, 5.5 .. 21.25
    return best - tl.where(slot < _BOUNDS, steps, _EVERYTHING) * step


@triton.jit
def _part_of(row, part, best, temperature, lowest, vocab_size: tl.constexpr, PART: tl.constexpr):
    """Logits and weights of a part of a row; behind its end -inf and 0."""
    at = part * PART + tl.arange(0, PART)
    values = tl.load(row + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    return values, quick_weights(values, best, 1.0 / temperature, lowest)


@triton.jit
def survey_kernel(
    logits, stride, settings, tokens, masses, numbers, vocab_size: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    index, part = tl.program_id(0), tl.program_id(1)
    place, temperature, top_k, top_p, lowest = load_settings(settings, index)
    if (top_p < 1.0) | (top_k < vocab_size):
        row = logits + place * stride
        best = tl.load(row + tl.load(tokens + place)).to(tl.float32)
        values, weights = _part_of(row, part, best, temperature, lowest, vocab_size, PART)
        slots = tl.arange(0, SLOTS)
        bounds = _bound(best, temperature, slots)
        mass = tl.zeros([SLOTS], tl.float32)
        if top_p < 1.0:
            mass += tl.sum(weights, axis=0)
            for number in range(_BOUNDS):
                bound = tl.sum(tl.where(slots == number, bounds, 0.0), axis=0)
                mass = tl.where(slots == number, tl.sum(tl.where(values >= bound, weights, 0.0), axis=0), mass)
        count = tl.zeros([SLOTS], tl.int32)
        if top_k < vocab_size:
            count += tl.sum((weights > 0).to(tl.int32), axis=0)
            for number in range(_BOUNDS):
                bound = tl.sum(tl.where(slots == number, bounds, 0.0), axis=0)
                is_above = (values >= bound) & (weights > 0)
                count = tl.where(slots == number, tl.sum(is_above.to(tl.int32), axis=0), count)
        kept = (index * tl.num_programs(1) + part) * SLOTS + slots
        tl.store(masses + kept, mass)
        tl.store(numbers + kept, count)


@triton.jit
def _bracket(masses, numbers, index, best, temperature, top_k, top_p, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Where the floor is: at or above `low`, below `high`, by what the survey found.

    Also whether top_k and whether anything excludes a token, the mass of everything, and mass and number
    of the tokens at or above `high`.
    """
    slots = tl.arange(0, SLOTS)
    at = tl.arange(0, PADDED)[:, None] * SLOTS + slots[None, :]
    inside = at < PARTS * SLOTS
    mass = tl.sum(tl.load(masses + index * PARTS * SLOTS + at, mask=inside, other=0.0), axis=0)
    number = tl.sum(tl.load(numbers + index * PARTS * SLOTS + at, mask=inside, other=0), axis=0)
    total = tl.max(mass, axis=0)
    is_top_k = top_k < tl.max(number, axis=0)
    kth = tl.min(tl.where(number >= top_k, slots, SLOTS - 1), axis=0)
    least_total = tl.max(tl.where((slots < kth) | (not is_top_k), mass, 0.0), axis=0)
    nucleus = tl.min(tl.where(mass >= top_p * least_total, slots, SLOTS - 1), axis=0)
    last = tl.where(is_top_k, kth, nucleus)
    first = tl.where(top_p < 1.0, tl.minimum(nucleus, last), last)
    low = _bound(best, temperature, last)
    high = tl.where(first > 0, _bound(best, temperature, first - 1), float("inf"))
    mass_above = tl.sum(tl.where(slots == first - 1, mass, 0.0), axis=0)
    number_above = tl.sum(tl.where(slots == first - 1, number, 0), axis=0)
    return is_top_k, is_top_k | (top_p < 1.0), low, high, total, mass_above, number_above


@triton.jit
def count_kernel(
    logits, stride, settings, tokens, masses, numbers, counts,
    vocab_size: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    index, part = tl.program_id(0), tl.program_id(1)
    place, temperature, top_k, top_p, lowest = load_settings(settings, index)
    if (top_p < 1.0) | (top_k < vocab_size):
        row = logits + place * stride
        best = tl.load(row + tl.load(tokens + place)).to(tl.float32)
        _, is_cut, low, high, _, _, _ = _bracket(
            masses, numbers, index, best, temperature, top_k, top_p, PARTS, PADDED
        )  # fmt: skip
        values, weights = _part_of(row, part, best, temperature, lowest, vocab_size, PART)
        is_in = (weights > 0) & (values >= low) & (values < high) & is_cut
        tl.atomic_add(counts + index * NUM_VALUES + order16(values), 1, mask=is_in, sem="relaxed")


@triton.jit
def _counted(counts, first, best, factor, CHUNK: tl.constexpr):
    """Numbers of the values from order `first` downwards, weights of one token, and weights of all."""
    orders = first - tl.arange(0, CHUNK)
    numbers = tl.load(counts + orders, mask=orders >= 0, other=0)
    weights = tl.where(numbers > 0, tl.exp((value16(tl.maximum(orders, 0)) - best) * factor), 0.0)
    return numbers, weights, weights * numbers.to(tl.float32)


@triton.jit
def _walk_number(counts, start, stop, best, factor, mass, number, top_k, CHUNK: tl.constexpr):
    """The order at which `number` reaches top_k, and the mass of exactly top_k tokens."""
    at = tl.arange(0, CHUNK)
    floor = tl.full([], -1, tl.int32)
    total = mass
    while (floor < 0) & (start >= stop):
        numbers, weights, masses = _counted(counts, start, best, factor, CHUNK)
        reached = number + tl.cumsum(numbers, axis=0)
        found = tl.min(tl.where(reached >= top_k, at, CHUNK), axis=0)
        above = number + tl.sum(tl.where(at < found, numbers, 0), axis=0)
        partly = tl.sum(tl.where(at == found, weights, 0.0), axis=0) * (top_k - above).to(tl.float32)
        total = mass + tl.sum(tl.where(at < found, masses, 0.0), axis=0) + partly
        floor = tl.where(found < CHUNK, start - found, -1)
        mass += tl.sum(masses, axis=0)
        number += tl.sum(numbers, axis=0)
        start -= CHUNK
    return floor, total


@triton.jit
def _walk_mass(counts, start, stop, best, factor, mass, wanted, CHUNK: tl.constexpr):
    """The order at which `mass` reaches what is wanted."""
    at = tl.arange(0, CHUNK)
    floor = tl.full([], -1, tl.int32)
    while (floor < 0) & (start >= stop):
        _, _, masses = _counted(counts, start, best, factor, CHUNK)
        found = tl.min(tl.where(mass + tl.cumsum(masses, axis=0) >= wanted, at, CHUNK), axis=0)
        floor = tl.where(found < CHUNK, start - found, -1)
        mass += tl.sum(masses, axis=0)
        start -= CHUNK
    return tl.where(floor < 0, stop, floor)


@triton.jit
def floor_kernel(
    logits, stride, settings, tokens, masses, numbers, counts, floors,
    vocab_size: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    place, temperature, top_k, top_p, _ = load_settings(settings, index)
    floor = tl.zeros([], tl.int32)
    if (top_p < 1.0) | (top_k < vocab_size):
        best = tl.load(logits + place * stride + tl.load(tokens + place)).to(tl.float32)
        is_top_k, is_cut, low, high, total, mass, number = _bracket(
            masses, numbers, index, best, temperature, top_k, top_p, PARTS, PADDED
        )
        if is_cut:
            mine = counts + index * NUM_VALUES
            factor = 1.0 / temperature
            start, stop = order16(tl.minimum(high, best)), order16(low)
            if is_top_k:
                floor, total = _walk_number(mine, start, stop, best, factor, mass, number, top_k, CHUNK)
            if top_p < 1.0:
                floor = tl.maximum(floor, _walk_mass(mine, start, stop, best, factor, mass, top_p * total, CHUNK))
            while start >= stop:  # all zero again for the next step
                orders = start - tl.arange(0, CHUNK)
                tl.store(mine + orders, tl.zeros([CHUNK], tl.int32), mask=orders >= stop)
                start -= CHUNK
    tl.store(floors + index, floor)
