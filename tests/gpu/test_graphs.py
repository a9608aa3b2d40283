"""Decode steps as graphs: which decoders can be captured, and that those which cannot leave nothing behind.

python -m pytest tests/gpu/test_graphs.py
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

from components.engine.decode_attention import DecodeTables
from components.engine.graphs import DecodeGraphs
from components.messages import Sampling

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
]

BLOCK, NUM_BLOCKS, VOCAB, MAX_BATCH = 16, 20, 32, 4


class NextId:
    """A decoder that chooses the id behind the one it gets."""

    def decode_into(self, ids: torch.Tensor, step: DecodeTables, logits: torch.Tensor) -> None:
        logits.zero_().scatter_(1, (ids[:, None] + 1) % VOCAB, 1.0)


class Asking(NextId):
    """Has the host look at a value."""

    def decode_into(self, ids: torch.Tensor, step: DecodeTables, logits: torch.Tensor) -> None:
        if ids.max() >= 0:
            super().decode_into(ids, step, logits)


class Varying(NextId):
    """Has a shape that depends on values."""

    def decode_into(self, ids: torch.Tensor, step: DecodeTables, logits: torch.Tensor) -> None:
        super().decode_into(ids[ids >= 0], step, logits)


class Secretive(NextId):
    """Waits in a way that torch does not notice, which spoils a capture under way."""

    def decode_into(self, ids: torch.Tensor, step: DecodeTables, logits: torch.Tensor) -> None:
        super().decode_into(ids, step, logits)
        torch.cuda.synchronize()


class Failing(NextId):
    """Stops while it is captured, which spoils nothing."""

    def decode_into(self, ids: torch.Tensor, step: DecodeTables, logits: torch.Tensor) -> None:
        super().decode_into(ids, step, logits)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not today")


def make_graphs(decoder: NextId) -> DecodeGraphs:
    blocks = torch.zeros((NUM_BLOCKS + 1, 1), dtype=torch.bfloat16, device="cuda")
    pool: Any = SimpleNamespace(blocks=blocks, num_blocks=NUM_BLOCKS, layout=SimpleNamespace(block_size=BLOCK))
    return DecodeGraphs(decoder, pool, max_batch=MAX_BATCH, vocab_size=VOCAB, max_blocks=NUM_BLOCKS)


def assert_captures(decoder: NextId) -> None:
    graphs, last_tokens = make_graphs(decoder), torch.zeros(MAX_BATCH, dtype=torch.int64, device="cuda")
    assert graphs.obstacle(last_tokens) is None
    graphs.capture(last_tokens, lambda _: None)
    sequences = PagedSequences([[3], [31], [8]], block_size=BLOCK, num_blocks=NUM_BLOCKS)
    logits = graphs.run(sequences.batch({0: 1, 1: 1, 2: 1}, Sampling(temperature=0.0)))
    assert logits.argmax(-1).tolist() == last_tokens[:3].tolist() == [4, 0, 9]


@pytest.mark.parametrize("decoder", [Asking(), Varying(), Secretive(), Failing()], ids=lambda each: type(each).__name__)
@torch.inference_mode()
def test_what_cannot_be_captured_is_told_and_leaves_nothing(decoder: NextId) -> None:
    graphs, last_tokens = make_graphs(decoder), torch.zeros(MAX_BATCH, dtype=torch.int64, device="cuda")
    reason = graphs.obstacle(last_tokens)
    assert reason
    assert "\n" not in reason
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.get_sync_debug_mode() == 0
    assert float(torch.rand(1000, device="cuda").sum().item()) > 0  # asks for a value, and draws
    del graphs
    torch.cuda.empty_cache()
    assert_captures(NextId())


@torch.inference_mode()
def test_what_can_be_captured_runs() -> None:
    assert_captures(NextId())
