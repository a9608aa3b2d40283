"""What a step has on the device, and that its buffer holds every step there can be. Needs triton, and no GPU.

TRITON_INTERPRET=1 python -m pytest tests/gpu/test_step_inputs.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "components" / "engine"))

from paged_sequences import PagedSequences

from components.engine import step_inputs
from components.engine.packing import most_blocks
from components.engine.runner import Batch
from components.engine.step_inputs import Inputs
from components.messages import Sampling

ALIGNMENT = 16  # bytes


@pytest.fixture(autouse=True)
def _always_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_inputs, "has_copy_engine", lambda _: True)


def make_inputs(max_tokens: int, max_sequences: int, max_len: int, block_size: int) -> Inputs:
    pool = SimpleNamespace(blocks=torch.zeros(2), layout=SimpleNamespace(block_size=block_size), num_blocks=9)
    attention: Any = SimpleNamespace(pool=pool)
    return Inputs(attention, max_tokens, max_sequences, most_blocks(max_sequences, max_len, block_size))


def make_batch(parts: list[tuple[int, int]], block_size: int) -> Batch:
    """Sequences of (tokens before, new tokens)."""
    num_blocks = sum(-(-(start + count) // block_size) for start, count in parts) + 1
    sequences = PagedSequences(
        [[7] * (start + count) for start, count in parts], block_size=block_size, num_blocks=num_blocks
    )
    sequences.computed = [start for start, _ in parts]
    return sequences.batch({i: count for i, (_, count) in enumerate(parts)}, Sampling(temperature=0.0))


@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize(
    ("max_tokens", "max_sequences", "max_len"),
    [(1, 1, 1), (5, 5, 7), (65, 64, 100), (2_048, 7, 3_000), (1_024, 1, 20_000)],
)
def test_the_largest_steps_have_room(max_tokens: int, max_sequences: int, max_len: int, block_size: int) -> None:
    inputs = make_inputs(max_tokens, max_sequences, max_len, block_size)
    count = min(max_sequences, max_tokens)
    each, left = min(max_tokens // count, max_len), min(max_tokens - max_sequences + 1, max_len)
    steps = [
        [(max_len - 1, 1)] * count,
        [(max_len - each, each)] * count,
        [(0, min(max_tokens, max_len))],
        *([[(max_len - 1, 1)] * (max_sequences - 1) + [(max_len - left, left)]] if left > 0 else []),
    ]
    for parts in steps:
        batch = make_batch(parts, block_size)
        sent = inputs.send(batch, None)
        assert sent.given.tolist() == batch.input_ids.tolist()
        assert sent.positions.tolist() == batch.positions.tolist()
        assert sent.slots.tolist() == batch.slot_mapping.tolist()
        assert sent.kept.tolist() == (batch.cu_seqlens_q[1:] - 1).tolist()
        decodes, chunks = sent.step._decodes, sent.step._chunks
        aligned = (sent.given, sent.fed, sent.positions, sent.slots, decodes.cu_blocks, decodes.blocks)
        assert all(each.data_ptr() % ALIGNMENT == 0 for each in aligned)
        if chunks is not None and chunks.side_by_side is not None:
            assert len(chunks.side_by_side.places) == len(chunks.blocks) + 1
            assert chunks.side_by_side.cu_seqlens[-1] == sum(start + n for start, n in parts if n > 1)


def test_decodes_and_chunks_have_tables_of_their_own() -> None:
    batch = make_batch([(20, 1), (3, 1), (0, 40), (17, 2)], 16)
    sent = make_inputs(64, 4, 100, 16).send(batch, 48)
    decodes, chunks = sent.step._decodes, sent.step._chunks
    assert decodes.positions.tolist() == [20, 3]
    assert decodes.cu_blocks.tolist()[:3] == [0, 2, 3]
    assert chunks is not None
    assert chunks.cu_seqlens_q.tolist() == [0, 40, 42]
    assert chunks.cu_blocks.tolist() == [0, 3, 5]
    assert chunks.blocks.tolist() == [*batch.table(2), *batch.table(3)]
    assert chunks.last_lengths.tolist() == [8, 3]
    assert chunks.side_by_side is None  # too few tokens
