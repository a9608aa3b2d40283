"""From a plan to the batch a runner executes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from components.engine.runner import Batch, Ints, SampleRow
from components.engine.scheduler import Work
from components.engine.sequence import Sequence

_NOTHING: Ints = np.empty(0, np.int32)


def assemble(work: tuple[Work, ...]) -> Batch:
    """The flattened batch of `work`; called after its blocks are allocated. Tables and sample rows are views."""
    starts = np.array([w.sequence.num_computed for w in work], np.int32)
    counts = np.array([w.num_tokens for w in work], np.int32)
    stops = starts + counts
    cu_seqlens = np.zeros(len(work) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    positions = np.repeat(starts - cu_seqlens[:-1], counts) + np.arange(cu_seqlens[-1], dtype=np.int32)
    spans = list(zip(work, starts.tolist(), stops.tolist(), strict=True))
    tables = tuple(w.sequence.blocks.view(0, w.sequence.num_blocks_for(stop)) for w, _, stop in spans)
    feeds = np.full(cu_seqlens[-1], -1, np.int32)
    for (w, _, stop), last in zip(spans, (cu_seqlens[1:] - 1).tolist(), strict=True):
        if w.sequence.num_pending and stop == w.sequence.tokens.size:
            feeds[last] = w.sequence.feed
    return Batch(
        input_ids=np.concatenate([w.sequence.tokens.view(start, stop) for w, start, stop in spans]),
        positions=positions,
        cu_seqlens_q=cu_seqlens,
        seq_lens=stops,
        block_tables=tables,
        slot_mapping=_slots(tables, positions, counts, block_size=work[0].sequence.block_size),
        feeds=feeds,
        samples=tuple(_sample_row(row, w.sequence) for row, w in enumerate(work) if is_sampled(w)),
    )


def _slots(tables: tuple[Ints, ...], positions: Ints, counts: Ints, *, block_size: int) -> npt.NDArray[np.int64]:
    """Where each new token's KV goes: its block's id * block_size + its place in the block."""
    firsts = np.zeros(len(tables), np.int64)  # where each table begins among all of them
    np.cumsum([len(table) for table in tables[:-1]], out=firsts[1:])
    blocks: Ints = np.concatenate(tables)[np.repeat(firsts, counts) + positions // block_size]
    slots: npt.NDArray[np.int64] = blocks.astype(np.int64) * block_size + positions % block_size
    return slots


def is_sampled(work: Work) -> bool:
    """Whether the last token of the work is the sequence's newest, so that the next one is chosen."""
    return work.sequence.num_computed + work.num_tokens == work.sequence.tokens.size


def _sample_row(row: int, sequence: Sequence) -> SampleRow:
    stopping = sequence.request.stopping
    boundary = sequence.num_prompt_tokens
    return SampleRow(
        row=row,
        sampling=sequence.request.sampling,
        position=sequence.tokens.size,
        prompt=sequence.tokens.view(0, boundary) if sequence.needs_tokens else _NOTHING,
        output=sequence.tokens.view(boundary) if sequence.needs_tokens else _NOTHING,
        banned=stopping.stop_token_ids if sequence.num_output_tokens < stopping.min_tokens else (),
    )
