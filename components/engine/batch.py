"""From a plan to the batch a runner executes."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from components.engine.runner import Batch, Ints, SampleRow
from components.engine.scheduler import Work

_NOTHING: Ints = np.empty(0, np.int32)


def assemble(work: tuple[Work, ...]) -> Batch:
    """The flattened batch of `work`; called after its blocks are allocated. All in it is its own."""
    block_size = work[0].sequence.block_size
    starts = np.array([part.start for part in work], np.int32)
    stops = np.array([part.stop for part in work], np.int32)
    counts = stops - starts
    cu_seqlens = cumulated(counts)
    positions = np.repeat(starts - cu_seqlens[:-1], counts) + np.arange(cu_seqlens[-1], dtype=np.int32)
    feeds = np.full(cu_seqlens[-1], -1, np.int32)
    feeds[cu_seqlens[1:] - 1] = [part.sequence.feed for part in work]  # what pends is its sequence's last token
    num_blocks = -(-stops // block_size)
    cu_blocks = cumulated(num_blocks)
    blocks = _joined([part.sequence.blocks[:n] for part, n in zip(work, num_blocks.tolist(), strict=True)])
    return Batch(
        input_ids=_joined([part.sequence.tokens[part.start : part.stop] for part in work]),
        positions=positions,
        cu_seqlens_q=cu_seqlens,
        seq_lens=stops,
        blocks=blocks,
        cu_blocks=cu_blocks,
        slot_mapping=_slots(blocks, np.repeat(cu_blocks[:-1], counts), positions, block_size),
        feeds=feeds,
        samples=tuple([_sample_row(row, part) for row, part in enumerate(work) if part.is_sampled]),
    )


def cumulated(counts: Ints) -> Ints:
    """Where each of consecutive parts begins, and where the last one ends: (parts + 1,)."""
    places = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=places[1:])
    return places


def _joined(pieces: list[array[int]]) -> Ints:
    """Ids one after another."""
    return np.frombuffer(bytearray().join(pieces), np.int32)


def _slots(blocks: Ints, firsts: Ints, positions: Ints, block_size: int) -> npt.NDArray[np.int64]:
    """Where each new token's KV goes: its block's id * block_size + its place in the block."""
    in_table, in_block = np.divmod(positions, block_size)
    slots: npt.NDArray[np.int64] = blocks[firsts + in_table].astype(np.int64) * block_size + in_block
    return slots


def _sample_row(row: int, work: Work) -> SampleRow:
    sequence, position = work.sequence, work.stop
    if sequence.is_plain:  # nearly all are
        return SampleRow(row, sequence.sampling, position, _NOTHING, _NOTHING, (), True)
    boundary, stopping = sequence.num_prompt_tokens, sequence.request.stopping
    return SampleRow(
        row,
        sequence.sampling,
        position,
        prompt=_joined([sequence.tokens[:boundary]]) if sequence.needs_tokens else _NOTHING,
        output=_joined([sequence.tokens[boundary:]]) if sequence.needs_tokens else _NOTHING,
        banned=stopping.stop_token_ids if position < boundary + stopping.min_tokens else (),
    )
