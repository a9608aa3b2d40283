"""Triton kernels that choose tokens from logits, each row spread over many programs.

The algorithm and its order are those of `sampling.py`. Rows with top_k or top_p go through the kernel of `row_floor.py`
first, or that of `wide_floor.py` if logits are not bfloat16, or the device cannot run the former; then all through

    score    parts of a row: the best of the part's buckets of 64 tokens, by weight and noise
    join     rows: the best bucket of all, and the draw within

Imported on CUDA hosts only; TRITON_INTERPRET=1 runs them on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from components.engine.row_floor import RowFloor
from components.engine.sampling_math import (
    BUCKET,
    SETTINGS,
    exact_weights,
    gumbel64,
    least_passed,
    load_settings,
    scale,
)
from components.engine.wide_floor import wide_floor_kernel

_PART = 4096
_WIDE_TILE = 16384


@triton.jit
def _score_kernel(
    logits, stride, settings, tokens, floors, scores, buckets, vocab_size: tl.constexpr,
    PART: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    index, part = tl.program_id(0), tl.program_id(1)
    place, temperature, _, _, lowest = load_settings(settings, index)
    row = logits + place * stride
    best = tl.load(row + tl.load(tokens + place)).to(tl.float32)
    numbers = part * (PART // BUCKET) + tl.arange(0, PART // BUCKET)
    at = numbers[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    values, weights = exact_weights(row, at, vocab_size, best, temperature, lowest)
    weights = tl.where(values >= least_passed(tl.load(floors + index), IS_WIDE), weights, 0.0)
    sums = tl.sum(weights, axis=1).to(tl.float64)
    noise = gumbel64(tl.load(settings + index * SETTINGS), numbers)
    score = tl.where(sums > 0, tl.log(sums) + noise, float("-inf"))
    kept = index * tl.num_programs(1) + part
    tl.store(scores + kept, tl.max(score, axis=0))
    tl.store(buckets + kept, part * (PART // BUCKET) + tl.argmax(score, axis=0))


@triton.jit
def _join_kernel(
    logits, stride, settings, tokens, floors, scores, buckets,
    vocab_size: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    place, temperature, _, _, lowest = load_settings(settings, index)
    row = logits + place * stride
    best = tl.load(row + tl.load(tokens + place)).to(tl.float32)
    parts = tl.arange(0, PADDED)
    score = tl.load(scores + index * PARTS + parts, mask=parts < PARTS, other=float("-inf"))
    bucket = tl.load(buckets + index * PARTS + tl.argmax(score, axis=0))
    at = bucket * BUCKET + tl.arange(0, BUCKET)
    values, weights = exact_weights(row, at, vocab_size, best, temperature, lowest)
    is_in = (values >= least_passed(tl.load(floors + index), IS_WIDE)) & (weights > 0)
    noise = gumbel64(tl.load(settings + index * SETTINGS + 1), tl.arange(0, BUCKET))
    inside = tl.where(is_in, scale(values, best, temperature).to(tl.float64) + noise, float("-inf"))
    tl.store(tokens + place, (bucket * BUCKET + tl.argmax(inside, axis=0)).to(tl.int64))


@dataclass(frozen=True)
class DrawSpace:
    """What the kernels leave for one another, for up to some number of drawn rows of one vocabulary."""

    floors: torch.Tensor  # (rows,): the order of the smallest logit that passes
    scores: torch.Tensor  # (rows, parts): of the best bucket
    buckets: torch.Tensor  # (rows, parts): its number
    part: int  # tokens of one program
    wide_tile: int = _WIDE_TILE  # tokens of float32 logits at once

    @classmethod
    def make(cls, rows: int, vocab_size: int, device: torch.device, *, part: int = _PART) -> DrawSpace:
        """Allocates them; 12 bytes for each part of a row."""
        parts = triton.cdiv(vocab_size, part)
        return cls(
            floors=torch.zeros(rows, dtype=torch.int64, device=device),
            scores=torch.zeros((rows, parts), dtype=torch.float64, device=device),
            buckets=torch.zeros((rows, parts), dtype=torch.int32, device=device),
            part=part,
        )


def draw(
    logits: torch.Tensor,
    settings: torch.Tensor,
    tokens: torch.Tensor,
    space: DrawSpace,
    row_floor: RowFloor | None,
    *,
    is_cut: bool,
) -> None:
    """Draws a token for some rows of `logits`, (rows, vocabulary), into their places in `tokens`, (rows,) of int64.

    `tokens` has each row's largest logit before. `settings` (drawn, 7) as `draw_settings.py` makes them;
    `is_cut` unless all of them leave top_k and top_p open.
    """
    count, vocab_size, part = len(settings), logits.shape[1], space.part
    is_wide = row_floor is None or logits.dtype is not torch.bfloat16
    parts = triton.cdiv(vocab_size, part)
    given = (logits, logits.stride(0), settings, tokens)
    if not is_cut:
        space.floors[:count].zero_()
    elif row_floor is None or is_wide:
        wide_floor_kernel[(count,)](*given, space.floors, vocab_size, TILE=space.wide_tile, num_warps=32)
    else:
        row_floor.find(logits, settings, tokens, space.floors)
    scored = (space.floors, space.scores, space.buckets)
    _score_kernel[(count, parts)](*given, *scored, vocab_size, PART=part, IS_WIDE=is_wide, num_warps=4)
    sizes = {"PARTS": parts, "PADDED": triton.next_power_of_2(parts)}
    _join_kernel[(count,)](*given, *scored, vocab_size, **sizes, IS_WIDE=is_wide, num_warps=2)


# --- greedy


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
    parts = triton.cdiv(size, _PART)
    best = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _argmax_kernel[(rows, parts)](logits, best, where, size, parts, PART=_PART, num_warps=4)
    _argmax_join_kernel[(rows,)](best, where, tokens, parts, PARTS=triton.next_power_of_2(parts), num_warps=1)
