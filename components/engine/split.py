"""A step's sequences apart: its leading decodes, and the chunks behind them, counted from their own beginning."""

from __future__ import annotations

import msgspec
import numpy as np

from components.engine.batch import cumulated
from components.engine.runner import Batch, Ints


class Split(msgspec.Struct, frozen=True):
    """The first D sequences have one new token each, and C others follow. The scheduler puts decodes first."""

    num_decodes: int  # D, as many as there are in front; one token's chunk is as good as a decode
    cu_seqlens_q: Ints  # (C + 1,) and from 0, as the next
    cu_blocks: Ints
    last_lengths: Ints  # (C,): tokens in the last block

    @property
    def num_chunks(self) -> int:
        return len(self.last_lengths)


def split(batch: Batch, block_size: int) -> Split:
    """Where a batch's leading decodes end, and the rest without them."""
    is_longer = np.diff(batch.cu_seqlens_q) != 1
    count = int(is_longer.argmax()) if is_longer.any() else batch.num_sequences
    cu_blocks = batch.cu_blocks[count:] - batch.cu_blocks[count]
    last_lengths = (batch.seq_lens[count:] - 1) % block_size + 1
    return Split(count, batch.cu_seqlens_q[count:] - batch.cu_seqlens_q[count], cu_blocks, last_lengths)


def places(parts: Split, block_size: int) -> Ints:
    """Where each block's tokens begin when those of all chunks, and of what is before them, lie side by side.

    (blocks + 1,): the last one is their number.
    """
    lengths = np.full(parts.cu_blocks[-1], block_size, np.int32)
    lengths[parts.cu_blocks[1:] - 1] = parts.last_lengths
    return cumulated(lengths)
