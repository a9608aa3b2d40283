"""From a plan to the batch a runner executes."""

from __future__ import annotations

import numpy as np

from components.engine.runner import Batch, SampleRow
from components.engine.scheduler import Work
from components.engine.sequence import Sequence


def assemble(work: tuple[Work, ...]) -> Batch:
    """The flattened batch of `work`; called after its blocks are allocated. Token and table arrays are views."""
    counts = np.fromiter((w.num_tokens for w in work), np.int32, len(work))
    starts = np.fromiter((w.sequence.num_computed for w in work), np.int32, len(work))
    cu_seqlens = np.zeros(len(work) + 1, np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    positions = np.repeat(starts - cu_seqlens[:-1], counts) + np.arange(cu_seqlens[-1], dtype=np.int32)
    seq_lens = starts + counts
    block_size = work[0].sequence.block_size
    tables = tuple(w.sequence.blocks.view(0, -(-int(n) // block_size)) for w, n in zip(work, seq_lens, strict=True))
    blocks = [
        t[s // block_size :].repeat(block_size)[s % block_size :][:n]
        for t, s, n in zip(tables, starts, counts, strict=True)
    ]
    return Batch(
        input_ids=np.concatenate(
            [w.sequence.tokens.view(s, e) for w, s, e in zip(work, starts, seq_lens, strict=True)]
        ),
        positions=positions,
        cu_seqlens_q=cu_seqlens,
        seq_lens=seq_lens,
        block_tables=tables,
        slot_mapping=np.concatenate(blocks).astype(np.int64) * block_size + positions % block_size,
        samples=tuple(_sample_row(row, w.sequence) for row, w in enumerate(work) if is_sampled(w)),
    )


def is_sampled(work: Work) -> bool:
    """Whether the last token of the work is the sequence's newest, so that the next one is chosen."""
    return work.sequence.num_computed + work.num_tokens == len(work.sequence)


def _sample_row(row: int, sequence: Sequence) -> SampleRow:
    stopping = sequence.request.stopping
    boundary = sequence.num_prompt_tokens
    return SampleRow(
        row=row,
        sampling=sequence.request.sampling,
        position=len(sequence),
        prompt=sequence.tokens.view(0, boundary),
        output=sequence.tokens.view(boundary),
        banned=stopping.stop_token_ids if sequence.num_output_tokens < stopping.min_tokens else (),
    )
