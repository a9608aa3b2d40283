"""The Triton kernel that shares out a decode step's attention: which program takes which part of which sequence.

One long sequence among short ones would keep a step waiting: 16,000 tokens beside 255 sequences of 200 made attention
take 555 us a layer on an H200, where reading it all takes 64. So sequences longer than twice the mean are cut into
parts; where there are few sequences, shorter ones are, too. It runs once a step on the GPU, in a CUDA graph as well,
and the layers' programs look their part up. Imported on CUDA hosts only; TRITON_INTERPRET=1 runs it on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUMBERS = tl.constexpr(8)
"""Of a part: its sequence, that one's new token's position and first place in the block tables; the tile of tokens it
begins with and the token it stops at; its number among the sequence's parts, how many these are, and the number of
the first of them."""

_PROGRAMS = 256  # about as many as keep a GPU busy
_LEAST_TOKENS = 512  # of a part; joining smaller ones costs more than it gains
_LEAST_TOKENS_OF_FEW = 128  # where there are fewer programs than keep a GPU busy


@triton.jit(do_not_specialize=["num_sequences", "num_work", "room", "least"])
def _share_kernel(
    positions, cu_blocks, work, num_sequences, num_work, room, least, IS_WRITTEN: tl.constexpr, WINDOW: tl.constexpr,
    TOKENS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, PADDED)
    inside = at < num_sequences
    position = tl.load(positions + at, mask=inside, other=0)
    begin = tl.maximum(position - WINDOW + 1, 0) // TOKENS * TOKENS if WINDOW > 0 else tl.zeros_like(position)
    stop = position + 1 if IS_WRITTEN else position
    lengths = tl.where(inside, stop - begin, 0)
    part = tl.cdiv(tl.maximum(tl.cdiv(tl.sum(lengths, axis=0), room), least), TOKENS) * TOKENS
    number = tl.where(inside, tl.maximum(tl.cdiv(lengths, part), 1), 0)
    each = tl.cdiv(tl.cdiv(lengths, TOKENS), tl.maximum(number, 1)) * TOKENS  # all parts are about as long
    number = tl.where(inside, tl.maximum(tl.cdiv(lengths, tl.maximum(each, 1)), 1), 0)
    ends = tl.cumsum(number, axis=0)
    first_block = tl.load(cu_blocks + at, mask=inside, other=0)
    for index in range(tl.max(number, axis=0)):
        is_part = index < number
        record = work + (ends - number + index) * NUMBERS
        tl.store(record, at, mask=is_part)
        tl.store(record + 1, position, mask=is_part)
        tl.store(record + 2, first_block, mask=is_part)
        tl.store(record + 3, (begin + index * each) // TOKENS, mask=is_part)
        tl.store(record + 4, tl.minimum(begin + (index + 1) * each, stop), mask=is_part)
        tl.store(record + 5, index + tl.zeros_like(at), mask=is_part)
        tl.store(record + 6, number, mask=is_part)
        tl.store(record + 7, ends - number, mask=is_part)
    total = tl.sum(number, axis=0)
    for start in range(0, num_work, PADDED):
        tl.store(work + (start + at) * NUMBERS, -1, mask=(start + at >= total) & (start + at < num_work))


def most_work(num_sequences: int, kv_heads: int) -> int:
    """How many parts a step of so many sequences has at most."""
    return num_sequences + _room(num_sequences, kv_heads)


def share(
    positions: torch.Tensor,
    cu_blocks: torch.Tensor,
    kv_heads: int,
    *,
    is_written: bool,
    window: int | None,
    tile: int,
    max_sequences: int,
) -> torch.Tensor:
    """Parts of a step, (most_work, NUMBERS) of int32; the sequence of those that are none is -1.

    `positions` (S,) and `cu_blocks` (S + 1,) of int32; programs take `tile` tokens at once. The new token is left out
    unless it `is_written`. One kernel serves all steps of up to `max_sequences`.
    """
    count, room = len(positions), _room(len(positions), kv_heads)
    least = _LEAST_TOKENS_OF_FEW if count * kv_heads < _PROGRAMS else _LEAST_TOKENS
    work = torch.empty((most_work(count, kv_heads), NUMBERS.value), dtype=torch.int32, device=positions.device)
    _share_kernel[(1,)](
        positions, cu_blocks, work, count, len(work), room, least, IS_WRITTEN=is_written, WINDOW=window or 0,
        TOKENS=tile, PADDED=triton.next_power_of_2(max_sequences), num_warps=4,
    )  # fmt: skip
    return work


def _room(num_sequences: int, kv_heads: int) -> int:
    """Parts beside the first ones of all sequences: such that one of mean length is not cut where there are many."""
    return max(_PROGRAMS // kv_heads, num_sequences // 2, 1)
