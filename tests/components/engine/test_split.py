"""Where a step's leading decodes end, and what is left of its tables for the chunks behind them."""

import numpy as np
from paged_sequences import PagedSequences

from components.engine.runner import Batch
from components.engine.split import places, split
from components.messages import Sampling

BLOCK = 4


def make_batch(*parts: tuple[int, int]) -> Batch:
    """Sequences of (tokens before, new tokens)."""
    sequences = PagedSequences([[7] * (start + count) for start, count in parts], block_size=BLOCK, num_blocks=99)
    sequences.computed = [start for start, _ in parts]
    return sequences.batch({i: count for i, (_, count) in enumerate(parts)}, Sampling(temperature=0.0))


def test_chunks_are_counted_from_the_first_of_them() -> None:
    found = split(make_batch((3, 1), (8, 1), (4, 5), (0, 4)), BLOCK)
    assert (found.num_decodes, found.num_chunks) == (2, 2)
    assert found.cu_seqlens_q.tolist() == [0, 5, 9]
    assert found.cu_blocks.tolist() == [0, 3, 4]
    assert found.last_lengths.tolist() == [1, 4]


def test_prompts_alone_are_all_chunks() -> None:
    batch = make_batch((0, 5), (0, 2))
    found = split(batch, BLOCK)
    assert (found.num_decodes, found.num_chunks) == (0, 2)
    assert found.cu_seqlens_q.tolist() == batch.cu_seqlens_q.tolist()
    assert found.cu_blocks.tolist() == batch.cu_blocks.tolist()


def test_decodes_alone_leave_no_chunk() -> None:
    found = split(make_batch((3, 1), (4, 1)), BLOCK)
    assert (found.num_decodes, found.num_chunks) == (2, 0)
    assert found.cu_seqlens_q.tolist() == found.cu_blocks.tolist() == [0]


def test_a_chunk_of_one_token_is_a_decode_in_front_and_a_chunk_behind_others() -> None:
    assert split(make_batch((0, 1), (0, 3)), BLOCK).num_decodes == 1
    found = split(make_batch((9, 1), (0, 3), (7, 1)), BLOCK)
    assert (found.num_decodes, found.num_chunks) == (1, 2)
    assert found.cu_seqlens_q.tolist() == [0, 3, 4]


def test_what_flashinfer_gets_is_int32() -> None:
    found = split(make_batch((3, 1), (0, 5)), BLOCK)
    assert {each.dtype for each in (found.cu_seqlens_q, found.cu_blocks, found.last_lengths)} == {np.dtype(np.int32)}


def test_blocks_lie_side_by_side_without_gaps() -> None:
    found = split(make_batch((3, 1), (0, 5), (6, 2), (2, 6)), BLOCK)  # chunks of 5, 8 and 8 tokens in all
    laid = places(found, BLOCK)
    assert laid.tolist() == [0, 4, 5, 9, 13, 17, 21]
    assert laid[found.cu_blocks].tolist() == [0, 5, 13, 21]
    assert laid.dtype == np.int32
