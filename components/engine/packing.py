"""The numbers of a decode step as CUDA graphs read them: one array, fields of fixed size in front.

Batches are padded to one of a few sizes with sequences of one token in a spare block.
"""

from __future__ import annotations

import numpy as np

from components.engine.runner import Batch, Ints

FIELDS = 4  # ids, feeds, positions, slots: each `max_batch` long; then cu_blocks and the blocks


def bucket_sizes(max_batch: int) -> list[int]:
    """The batch sizes that are captured, in rising order."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_batch + 1, 32)]
    return [*[size for size in sizes if size < max_batch], max_batch]


def packed_size(max_batch: int, num_blocks: int) -> int:
    """Numbers of a step with so many blocks in its tables, padding included."""
    return (FIELDS + 1) * max_batch + 1 + num_blocks


def most_blocks(max_num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Blocks in a step's tables at most: sequences may share prefixes, so that no pool's size bounds them."""
    return max_num_seqs * -(-max_model_len // block_size)


def pack(batch: Batch, bucket: int, max_batch: int, *, block_size: int, spare_block: int) -> Ints:
    """The numbers of a decode step as the graphs read them."""
    count = batch.num_sequences
    num_blocks, num_spare = len(batch.blocks), bucket - count
    head = FIELDS * max_batch
    values = np.zeros(packed_size(max_batch, num_blocks + num_spare), np.int32)
    fields = values[:head].reshape(FIELDS, max_batch)
    fields[1], fields[3] = -1, spare_block * block_size
    fields[0, :count] = batch.input_ids
    if batch.feeds is not None:
        fields[1, :count] = batch.feeds
    fields[2, :count] = batch.positions
    fields[3, :count] = batch.slot_mapping
    cu_blocks, blocks = values[head : head + bucket + 1], values[head + max_batch + 1 :]
    cu_blocks[: count + 1] = batch.cu_blocks
    cu_blocks[count + 1 :] = np.arange(num_blocks + 1, num_blocks + num_spare + 1)
    blocks[:num_blocks], blocks[num_blocks:] = batch.blocks, spare_block
    return values


def is_packable(batch: Batch, max_batch: int, capacity: int) -> bool:
    """Whether the batch is a decode step, one token for each sequence, each choosing the next, that fits."""
    count = batch.num_sequences
    is_decode = len(batch.input_ids) == count == len(batch.samples) and count <= max_batch
    return is_decode and packed_size(max_batch, len(batch.blocks) + max_batch) <= capacity
