"""Chunks whose keys and values are gathered: the copy, and attention over it beside that over blocks.

python -m pytest tests/gpu/test_gathered_chunks.py                       on a Hopper GPU
TRITON_INTERPRET=1 python -m pytest tests/gpu/test_gathered_chunks.py    the copy alone, anywhere
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "components" / "engine"))

from paged_sequences import PagedSequences

from components.engine import step_inputs
from components.engine.attention import KVPool, Shape
from components.engine.decode_attention import DecodeAttention
from components.engine.flash import FlashAttention
from components.engine.gather_kernels import gather
from components.engine.runner import Batch
from components.engine.split import places, split
from components.engine.step_inputs import Inputs
from components.messages import KVLayout, Sampling

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

BLOCK, LAYERS, HEADS, KV_HEADS = 16, 2, 4, 2
SHAPES = [Shape(0.1), Shape(0.1, 300), Shape(0.1, 24)]


def make_batch(*parts: tuple[int, int], block_size: int = BLOCK) -> Batch:
    """Sequences of (tokens before, new tokens)."""
    lengths = [start + count for start, count in parts]
    num_blocks = sum(-(-length // block_size) for length in lengths) + 5
    sequences = PagedSequences([[7] * length for length in lengths], block_size=block_size, num_blocks=num_blocks)
    sequences.computed = [start for start, _ in parts]
    return sequences.batch({i: count for i, (_, count) in enumerate(parts)}, Sampling(temperature=0.0))


def on_device(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(DEVICE)


@pytest.mark.parametrize(("dim", "block_size"), [(64, BLOCK), (128, BLOCK), (64, 24), (64, 150), (64, 1)])
def test_what_is_gathered_is_what_lies_in_the_blocks(dim: int, block_size: int) -> None:
    batch = make_batch((3, 1), (0, 5), (130, 30), (2, 62), block_size=block_size)
    parts = split(batch, block_size)
    laid = places(parts, block_size)
    dtype = torch.float32 if IS_INTERPRETED else torch.bfloat16
    pool = torch.randn(int(batch.blocks.max()) + 1, KV_HEADS, LAYERS, 2, block_size, dim, device=DEVICE).to(dtype)
    sides = [torch.full((int(laid[-1]) + 1, KV_HEADS, dim), 9.0, device=DEVICE, dtype=dtype) for _ in range(2)]
    own = batch.blocks[batch.cu_blocks[parts.num_decodes] :]
    gather(pool, 1, on_device(own), on_device(laid), (sides[0], sides[1]))
    for side in range(2):
        expected = torch.cat(
            [
                pool[on_device(batch.table(i)).long(), :, 1, side].transpose(1, 2).flatten(0, 1)[: batch.seq_lens[i]]
                for i in range(parts.num_decodes, batch.num_sequences)
            ]
        )
        assert torch.equal(sides[side][:-1], expected)
        assert (sides[side][-1] == 9.0).all()  # nothing goes behind the last token


@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU and FlashInfer")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "parts", [[(0, 1_500)], [(0, 700), (800, 600)], [(90, 1), (70, 1), (0, 1_100), (1_000, 40)]], ids=str
)
@torch.inference_mode()
def test_attention_is_the_same_as_from_blocks(
    parts: list[tuple[int, int]], shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(*parts)
    dim = 128
    layout = KVLayout("", "bfloat16", BLOCK, LAYERS, KV_HEADS, dim, 0, KV_HEADS)
    pool = KVPool(layout, int(batch.blocks.max()) + 1, DEVICE)
    pool.blocks.normal_()
    attention = FlashAttention(pool, HEADS, DecodeAttention(pool.blocks, HEADS, 8))
    queries = torch.randn(len(batch.positions), HEADS, dim, device=DEVICE, dtype=torch.bfloat16)
    outcomes = []
    for can_gather in (False, True):
        monkeypatch.setattr(step_inputs, "has_copy_engine", lambda _, can=can_gather: can)
        step = Inputs(attention, len(queries), 8, len(batch.blocks)).send(batch, None).step
        assert step._chunks is not None
        assert (step._chunks.side_by_side is not None) == can_gather
        outcomes += [step.attend(layer, queries, shape).float() for layer in range(LAYERS)]
    for layer in range(LAYERS):
        torch.testing.assert_close(outcomes[layer], outcomes[LAYERS + layer], atol=1e-2, rtol=1e-2)
    assert not torch.allclose(outcomes[0], outcomes[1], atol=0.1)
