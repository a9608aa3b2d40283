"""A decode step's numbers for the graphs: fields in their places, padding that touches no sequence."""

import msgspec
import numpy as np
from paged_sequences import PagedSequences

from components.engine.packing import FIELDS, bucket_sizes, is_packable, most_blocks, pack, packed_size
from components.engine.runner import Batch
from components.messages import Sampling

BLOCK = 4
MAX_BATCH = 8
SPARE = 99


def make_batch(*lengths: int) -> Batch:
    """A token for each of sequences that have so many before it."""
    sequences = PagedSequences([[7] * (length + 1) for length in lengths], block_size=BLOCK, num_blocks=SPARE)
    sequences.computed = list(lengths)
    return sequences.batch(dict.fromkeys(range(len(lengths)), 1), Sampling(temperature=0.0))


def packed(batch: Batch, bucket: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fields (4, bucket), cu_blocks and blocks."""
    values = pack(batch, bucket, MAX_BATCH, block_size=BLOCK, spare_block=SPARE)
    fields, rest = values[: FIELDS * MAX_BATCH].reshape(FIELDS, MAX_BATCH), values[FIELDS * MAX_BATCH :]
    return fields[:, :bucket], rest[: bucket + 1], rest[MAX_BATCH + 1 :]


def test_a_full_bucket_has_the_batch_and_nothing_else() -> None:
    batch = msgspec.structs.replace(make_batch(1, 4, 9), feeds=np.array([2, -1, 0], np.int32))
    fields, cu_blocks, blocks = packed(batch, 3)
    assert fields.tolist() == [[7, 7, 7], [2, -1, 0], [1, 4, 9], batch.slot_mapping.tolist()]
    assert cu_blocks.tolist() == [0, 1, 3, 6]
    assert blocks.tolist() == batch.blocks.tolist()


def test_padding_is_sequences_of_one_token_in_the_spare_block() -> None:
    batch = make_batch(6)
    fields, cu_blocks, blocks = packed(batch, 4)
    assert fields[:, 1:].T.tolist() == [[0, -1, 0, SPARE * BLOCK]] * 3
    assert cu_blocks.tolist() == [0, 2, 3, 4, 5]
    assert blocks.tolist() == [*batch.blocks.tolist(), SPARE, SPARE, SPARE]


def test_what_fits_is_a_step_of_single_tokens_that_all_choose() -> None:
    batch, room = make_batch(6, 2), packed_size(MAX_BATCH, 3 + MAX_BATCH)
    assert is_packable(batch, MAX_BATCH, room)
    assert not is_packable(batch, MAX_BATCH, room - 1)
    assert not is_packable(batch, 1, room)
    assert not is_packable(msgspec.structs.replace(batch, samples=batch.samples[:1]), MAX_BATCH, room)


def test_the_largest_bucket_is_the_largest_batch() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(3) == [1, 2, 3]
    assert bucket_sizes(512)[-3:] == [448, 480, 512]


def test_tables_that_share_a_prefix_fit_whatever_the_pool() -> None:
    """256 sequences of 6,000 shared tokens need 96,000 numbers, though the pool has only a few thousand blocks."""
    assert most_blocks(256, 6_100, 16) >= 256 * 382
