"""The fake runner: its tokens depend on every slot it reads, and equal the oracle's."""

from __future__ import annotations

import time

import numpy as np
import pytest

from components.engine.fake import FakeRunner, fake_generate
from components.engine.runner import Batch, SampleRow
from components.messages import Sampling
from components.options import FakeEngine

GREEDY = Sampling(temperature=0.0)
PROMPT = list(range(300, 337))  # two blocks and five tokens
INSTANT = FakeEngine(step_ms=0, token_ms=0)


def make_batch(tokens: list[int], table: list[int], start: int = 0, sampling: Sampling = GREEDY) -> Batch:
    """One sequence that computes all tokens from `start` on and chooses the next one."""
    positions = np.arange(start, len(tokens), dtype=np.int32)
    ids, blocks = np.array(tokens, np.int32), np.array(table, np.int32)
    return Batch(
        input_ids=ids[start:],
        positions=positions,
        cu_seqlens_q=np.array([0, len(positions)], np.int32),
        seq_lens=np.array([len(tokens)], np.int32),
        blocks=blocks,
        cu_blocks=np.array([0, len(blocks)], np.int32),
        slot_mapping=blocks[positions // 16].astype(np.int64) * 16 + positions % 16,
        samples=(SampleRow(0, sampling, len(tokens), ids, ids[:0]),),
    )


def test_the_next_token_is_the_oracles_over_scattered_blocks() -> None:
    runner = FakeRunner(num_blocks=8, speed=INSTANT)
    tokens = list(PROMPT)
    tokens += runner.execute(make_batch(tokens, [5, 0, 7])).tokens.tolist()
    tokens += runner.execute(make_batch(tokens, [5, 0, 7], start=len(PROMPT))).tokens.tolist()
    assert tokens[len(PROMPT) :] == fake_generate(PROMPT, 2, GREEDY)


@pytest.mark.parametrize("place", [(5, 0, 0, 0, 0, 0), (0, 1, 1, 1, 15, 1), (7, 1, 0, 1, 4, 0)])
def test_one_changed_word_anywhere_changes_the_token(place: tuple[int, ...]) -> None:
    runner = FakeRunner(num_blocks=8, speed=INSTANT)
    runner.execute(make_batch(PROMPT, [5, 0, 7]))
    runner.memory[place] ^= 1
    assert runner.execute(make_batch([*PROMPT, 9], [5, 0, 7], start=len(PROMPT))).tokens != fake_generate(
        [*PROMPT, 9], 1, GREEDY
    )


def test_words_behind_the_sequences_end_are_not_read() -> None:
    runner = FakeRunner(num_blocks=8, speed=INSTANT)
    runner.memory[7, :, :, :, 5:] = 12345
    assert runner.execute(make_batch(PROMPT, [5, 0, 7])).tokens == fake_generate(PROMPT, 1, GREEDY)


def test_swapped_blocks_and_swapped_heads_change_the_token() -> None:
    runner = FakeRunner(num_blocks=8, speed=INSTANT)
    tokens = [7] * 32 + [8]
    expected = fake_generate([*tokens, 9], 1, GREEDY)
    runner.execute(make_batch(tokens, [5, 0, 7]))
    assert runner.execute(make_batch([*tokens, 9], [5, 0, 7], start=33)).tokens == expected
    assert runner.execute(make_batch([*tokens, 9], [0, 5, 7], start=33)).tokens != expected
    runner.memory[5] = runner.memory[5, ::-1]
    assert runner.execute(make_batch([*tokens, 9], [5, 0, 7], start=33)).tokens != expected


def test_sampling_depends_on_the_seed_and_greedy_does_not() -> None:
    one, two = (fake_generate(PROMPT, 8, Sampling(seed=seed)) for seed in (1, 2))
    assert one != two
    assert one == fake_generate(PROMPT, 8, Sampling(seed=1))
    assert fake_generate(PROMPT, 8, Sampling(temperature=0.0, seed=3)) == fake_generate(PROMPT, 8, GREEDY)


def test_a_banned_token_is_not_chosen() -> None:
    favourite = fake_generate(PROMPT, 1, GREEDY)[0]
    assert fake_generate(PROMPT, 3, GREEDY, stop_token_ids=(favourite,)) == [favourite]
    assert fake_generate(PROMPT, 3, GREEDY, stop_token_ids=(favourite,), min_tokens=1)[0] != favourite


def test_a_step_takes_the_time_that_was_set_without_computing() -> None:
    runner = FakeRunner(num_blocks=8, speed=FakeEngine(step_ms=20, token_ms=1))
    wall_s, cpu_s = time.monotonic(), time.thread_time()
    runner.execute(make_batch(PROMPT, [5, 0, 7]))
    assert time.monotonic() - wall_s >= 0.020 + 0.001 * len(PROMPT)
    assert time.thread_time() - cpu_s < 0.020


def test_the_region_is_the_memory_itself() -> None:
    runner = FakeRunner(num_blocks=3, block_size=8)
    assert runner.region.address == runner.memory.ctypes.data
    assert runner.region.block_bytes * runner.region.num_blocks == runner.memory.nbytes
    assert runner.memory.flags["C_CONTIGUOUS"]
