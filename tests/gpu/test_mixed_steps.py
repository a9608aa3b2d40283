"""Attention of steps with decodes in them: our kernel for these, a stand-in for FlashInfer's for the chunks behind.

python -m pytest tests/gpu/test_mixed_steps.py                       on a CUDA device
TRITON_INTERPRET=1 python -m pytest tests/gpu/test_mixed_steps.py    anywhere, by Triton's interpreter
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "components" / "engine"))

from paged_sequences import PagedSequences

from components.engine.attention import Shape
from components.engine.decode_attention import DecodeAttention
from components.engine.flash import FlashStep, Tables
from components.engine.runner import Batch
from components.engine.step_inputs import Inputs
from components.messages import Sampling

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPES = [torch.float32 if IS_INTERPRETED else torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # of averages of values of size one

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

BLOCK, NUM_BLOCKS, LAYERS, LAYER = 16, 200, 2, 1


class Heads(msgspec.Struct, frozen=True):
    """How many query heads share how many of KV, and how large they are."""

    query: int
    kv: int
    dim: int


FOURS = Heads(4, 2, 64)
DECODES = [(0, 1), (15, 1), (16, 1), (127, 1), (128, 1), (300, 1)]  # tokens before, and new ones
CHUNKS = [(40, 7), (0, 33), (9, 1)]
CASES: dict[str, tuple[Heads, Shape, list[tuple[int, int]]]] = {
    "decodes and chunks": (FOURS, Shape(0.125), DECODES + CHUNKS),
    "decodes": (FOURS, Shape(0.125), DECODES),
    "chunks": (FOURS, Shape(0.125), CHUNKS),
    "a decode": (FOURS, Shape(0.125), [(500, 1)]),
    "a decode and chunks": (FOURS, Shape(0.125), [(500, 1), *CHUNKS]),
    "a window": (FOURS, Shape(0.125, 24), DECODES + CHUNKS),
    "a long window": (FOURS, Shape(0.125, 200), [(500, 1), *CHUNKS]),
    "a window of itself": (FOURS, Shape(0.125, 1), DECODES + CHUNKS),
    "capped": (FOURS, Shape(0.5, None, 5.0), DECODES + CHUNKS),
    "capped in a window": (FOURS, Shape(0.5, 24, 5.0), DECODES + CHUNKS),
    "heads of 128": (Heads(8, 2, 128), Shape(0.1), DECODES + CHUNKS),
    "heads of 256": (Heads(4, 2, 256), Shape(0.06, 24, 50.0), DECODES + CHUNKS),
    "groups of three": (Heads(9, 3, 64), Shape(0.125), DECODES + CHUNKS),
    "groups of 16": (Heads(16, 1, 64), Shape(0.125), DECODES + CHUNKS),
    "groups of 24": (Heads(24, 1, 64), Shape(0.125), DECODES + CHUNKS),
    "many decodes": (FOURS, Shape(0.125), [(i % 40, 1) for i in range(64)] + CHUNKS),  # in tiles of 64 tokens
}


class Step:
    """One step over random sequences, most of whose tokens are there already, and what it must give."""

    def __init__(self, heads: Heads, shape: Shape, parts: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.shape = shape
        sequences = PagedSequences([[0] * sum(part) for part in parts], block_size=BLOCK, num_blocks=NUM_BLOCKS)
        sequences.computed = [start for start, _ in parts]
        self.batch = sequences.batch({i: count for i, (_, count) in enumerate(parts)}, Sampling(temperature=0.0))
        generator = torch.Generator().manual_seed(0)
        size = (NUM_BLOCKS, heads.kv, LAYERS, 2, BLOCK, heads.dim)
        self.pool = torch.full(size, float("nan"), dtype=dtype)  # what nobody wrote must not count
        self.queries = torch.randn((len(self.batch.positions), heads.query, heads.dim), generator=generator).to(dtype)
        self.new = torch.randn((2, len(self.queries), heads.kv, heads.dim), generator=generator).to(dtype)
        self.expected = torch.empty(self.queries.shape)
        for i, (start, count) in enumerate(parts):
            kv = torch.randn((2, start, heads.kv, heads.dim), generator=generator).to(dtype)
            for at in range(start):
                self.pool[self.batch.table(i)[at // BLOCK], :, LAYER, :, at % BLOCK] = kv[:, at].transpose(0, 1)
            rows = slice(int(self.batch.cu_seqlens_q[i]), int(self.batch.cu_seqlens_q[i]) + count)
            keys, values = torch.cat((kv, self.new[:, rows]), dim=1).float()
            self.expected[rows] = attention(self.queries[rows].float(), keys, values, shape)
        self.pool = self.pool.to(DEVICE)
        self.flash: Any = SimpleNamespace(
            pool=SimpleNamespace(blocks=self.pool, layout=SimpleNamespace(block_size=BLOCK), num_blocks=NUM_BLOCKS),
            decodes=DecodeAttention(self.pool, heads.query, self.batch.num_sequences),
            plan_chunks=self._plan,
        )
        self.planned: list[Tables] = []

    def make(self) -> FlashStep:
        """The step as the runner makes it."""
        return (
            Inputs(self.flash, len(self.queries), self.batch.num_sequences, len(self.batch.blocks))
            .send(self.batch, None)
            .step
        )

    def error(self, attended: torch.Tensor) -> float:
        """The largest difference from what it must give."""
        return float((attended.float().cpu() - self.expected).abs().nan_to_num(nan=1e9).max())

    def _plan(self, key: tuple[float, int | None, float | None], tables: Tables) -> Any:
        assert key == (self.shape.scaling, self.shape.sliding_window, self.shape.softcap)
        self.planned.append(tables)
        return lambda layer, queries, out: self._run(tables, layer, queries, out)

    def _run(self, tables: Tables, layer: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """As FlashInfer does it."""
        kv = (self.pool[:, :, layer, 0], self.pool[:, :, layer, 1])
        starts, firsts = tables.cu_seqlens_q.tolist(), tables.cu_blocks.tolist()
        assert starts[-1] == len(queries) == len(out)
        for i, last in enumerate(tables.last_lengths.tolist()):
            table = tables.blocks[firsts[i] : firsts[i + 1]].long()
            length = (len(table) - 1) * BLOCK + last
            keys, values = (side[table].transpose(1, 2).flatten(0, 1)[:length].float() for side in kv)
            rows = slice(starts[i], starts[i + 1])
            out[rows] = attention(queries[rows].float(), keys, values, self.shape).to(out.dtype)


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Of the last Q of N tokens, written out: queries (Q, heads, dim), keys and values (N, kv heads, dim)."""
    count, length = len(queries), len(keys)
    keys, values = (side.repeat_interleave(queries.shape[1] // side.shape[1], 1) for side in (keys, values))
    scores = torch.einsum("qhd,nhd->hqn", queries, keys) * shape.scaling
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    row, column = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
    seen = column <= row
    if shape.sliding_window is not None:
        seen &= column > row - shape.sliding_window
    weights = scores.masked_fill(~seen.to(scores.device), float("-inf")).softmax(-1)
    return torch.einsum("hqn,nhd->qhd", weights, values)


def on_device(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(DEVICE)


def num_leading_decodes(batch: Batch) -> int:
    lengths = np.diff(batch.cu_seqlens_q).tolist()
    return next((i for i, length in enumerate(lengths) if length > 1), len(lengths))


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, DTYPES[0]) for name in CASES), ("capped in a window", DTYPES[1])], ids=str
)
@torch.inference_mode()
def test_attention_is_that_of_every_sequence_alone(name: str, dtype: torch.dtype) -> None:
    step = Step(*CASES[name], dtype)
    made = step.make()
    made.write(LAYER, *step.new.to(DEVICE))
    queries = step.queries.to(DEVICE)
    for _ in range(2):  # the second one finds what the parts of the first have left
        assert step.error(made.attend(LAYER, queries, step.shape)) < TOLERANCE[dtype]
    turned = queries.transpose(0, 1).contiguous().transpose(0, 1)  # as transformers' layers hand them over
    out = torch.full_like(queries, float("nan"))
    assert made.attend(LAYER, turned, step.shape, out) is out
    assert step.error(out) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", ["decodes and chunks", "decodes", "chunks", "a decode and chunks"])
@torch.inference_mode()
def test_only_chunks_are_planned_and_once(name: str) -> None:
    heads, shape, parts = CASES[name]
    step = Step(heads, shape, parts, DTYPES[0])
    made = step.make()
    made.write(LAYER, *step.new.to(DEVICE))
    for _ in range(2):
        made.attend(LAYER, step.queries.to(DEVICE), shape)
    chunks = parts[num_leading_decodes(step.batch) :]
    assert [np.diff(tables.cu_seqlens_q).tolist() for tables in step.planned] == (
        [[count for _, count in chunks]] if chunks else []
    )
