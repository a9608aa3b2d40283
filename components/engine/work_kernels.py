"""The Triton kernel that shares out a decode step's attention: which program takes which part of which sequence.

One long sequence among short ones would keep a step waiting: 16,000 tokens beside 255 sequences of 200 made attention
take 554 us a layer on an H200, where reading it all takes 65. So sequences longer than twice the mean are cut into
parts; where there are few sequences, shorter ones are, too. It runs once a step on the GPU, in a CUDA graph as well,
and the layers' programs look their part up. Imported on CUDA hosts only; TRITON_INTERPRET=1 runs it on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_PROGRAMS = 256  # about as many as keep a GPU busy
_LEAST_TOKENS = 512  # of a part; joining smaller ones costs more than it gains
_LEAST_TOKENS_OF_FEW = 128  # where there are fewer programs than keep a GPU busy


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, TOKENS: tl.constexpr):
    """The first token that the query at `position` attends to, down to a multiple of TOKENS."""
    return tl.maximum(position - WINDOW + 1, 0) // TOKENS * TOKENS if WINDOW > 0 else 0


@triton.jit(do_not_specialize=["num_sequences", "num_work", "room", "least"])
def _share_kernel(
    positions, work, firsts, num_sequences, num_work, room, least, WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, PADDED)
    inside = at < num_sequences
    position = tl.load(positions + at, mask=inside, other=0)
    lengths = tl.where(inside, position + 1 - first_seen(position, WINDOW, TOKENS), 0)
    part = tl.maximum(tl.cdiv(tl.sum(lengths, axis=0), room), least)
    number = tl.where(inside, tl.maximum(tl.cdiv(lengths, part), 1), 0)
    ends = tl.cumsum(number, axis=0)
    tl.store(firsts + at, ends - number, mask=inside)
    total = tl.sum(number, axis=0)
    tl.store(firsts + num_sequences, total)
    for each in range(tl.max(number, axis=0)):
        tl.store(work + ends - number + each, at, mask=each < number)
    for start in range(0, num_work, PADDED):
        tl.store(work + start + at, -1, mask=(start + at >= total) & (start + at < num_work))


@dataclass(frozen=True)
class Shares:
    """A step's work, all int32 on the device."""

    work: torch.Tensor  # (W,): the sequence whose part it is; -1 behind the last one
    firsts: torch.Tensor  # (S + 1,): each sequence's first part among all


def most_work(num_sequences: int, kv_heads: int) -> int:
    """How many parts a step of so many sequences has at most."""
    return num_sequences + _room(num_sequences, kv_heads)


def share(positions: torch.Tensor, kv_heads: int, *, window: int | None, tile: int, max_sequences: int) -> Shares:
    """Shares a step out by the positions of its new tokens, (S,) of int32, where programs take `tile` tokens at once.

    One kernel serves all steps of up to `max_sequences`.
    """
    count, room = len(positions), _room(len(positions), kv_heads)
    least = _LEAST_TOKENS_OF_FEW if count * kv_heads < _PROGRAMS else _LEAST_TOKENS
    work = torch.empty(most_work(count, kv_heads), dtype=torch.int32, device=positions.device)
    firsts = torch.empty(count + 1, dtype=torch.int32, device=positions.device)
    _share_kernel[(1,)](
        positions, work, firsts, count, len(work), room, least, WINDOW=window or 0, TOKENS=tile,
        PADDED=triton.next_power_of_2(max_sequences), num_warps=4,
    )  # fmt: skip
    return Shares(work, firsts)


def _room(num_sequences: int, kv_heads: int) -> int:
    """Parts beside the first ones of all sequences: such that one of mean length is not cut where there are many."""
    return max(_PROGRAMS // kv_heads, num_sequences // 2, 1)
