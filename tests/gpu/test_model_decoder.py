"""Models that transformers runs itself, over our attention: chunks and decodes in one step, then decodes alone.

    python -m pytest tests/gpu/test_model_decoder.py                       on a CUDA device
    TRITON_INTERPRET=1 python -m pytest tests/gpu/test_model_decoder.py    anywhere, by Triton's interpreter

What captures decode steps is in `test_cuda_correctness.py`, where a device is needed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "components" / "engine"))

from paged_sequences import PagedSequences
from test_mixed_steps import attention

from components.engine import torch_runner
from components.engine.attention import Shape
from components.engine.decode_attention import DecodeAttention, DecodeTables
from components.engine.flash import FlashStep, Tables
from components.engine.loading import ATTENTION
from components.engine.model_decoder import ModelDecoder
from components.engine.runner import Batch
from components.engine.split import split
from components.messages import Sampling

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15}  # of logits, whose largest are about 4

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

BLOCK, NUM_BLOCKS, LAYERS, VOCAB = 16, 64, 2, 64
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256,
    "pad_token_id": 0, "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
CAPPED = {"sliding_window": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2Config", {**CAPPED, "query_pre_attn_scalar": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
}
PROMPTS = (1, 40, 150)


class FlashStandIn:
    """What takes the place of `FlashAttention`: our own kernel, and chunks attended for as it is written."""

    def __init__(self, pool: torch.Tensor, num_query_heads: int) -> None:
        self.pool = SimpleNamespace(blocks=pool, layout=SimpleNamespace(block_size=BLOCK))
        self.decodes = DecodeAttention(pool, num_query_heads, 8)
        self.planned: list[Tables] = []

    def plan_chunks(self, key: tuple[float, int | None, float | None], tables: Tables) -> Any:
        """Attends for a kind of layer."""
        self.planned.append(tables)
        return lambda layer, queries, out: self._run(layer, Shape(*key), tables, queries, out)

    def _run(self, layer: int, shape: Shape, tables: Tables, queries: torch.Tensor, out: torch.Tensor) -> None:
        starts, firsts = tables.cu_seqlens_q.tolist(), tables.cu_blocks.tolist()
        for i, last in enumerate(tables.last_lengths.tolist()):
            table = tables.blocks[firsts[i] : firsts[i + 1]].long()
            length = (len(table) - 1) * BLOCK + last
            kv = self.pool.blocks[table, :, layer].permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :length].float()
            rows = slice(starts[i], starts[i + 1])
            out[rows] = attention(queries[rows].float(), *kv, shape).to(out.dtype)


class Run:
    """A model over paged sequences, and what transformers says of them."""

    def __init__(self, name: str) -> None:
        kind, settings = MODELS[name]
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**{**SMALL, **settings})
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(DEVICE, DTYPE)
        random = np.random.default_rng(0)
        tokens = [random.integers(1, VOCAB, length + 3).tolist() for length in PROMPTS]
        self.expected = [model(torch.tensor([each], device=DEVICE), use_cache=False).logits[0] for each in tokens]
        torch_runner._register_attention()
        model.set_attn_implementation(ATTENTION)
        shape = (NUM_BLOCKS, config.num_key_value_heads, LAYERS, 2, BLOCK, config.head_dim)
        pool = torch.full(shape, float("nan"), dtype=DTYPE, device=DEVICE)  # what nobody wrote must not count
        self.flash: Any = FlashStandIn(pool, config.num_attention_heads)
        self.sequences = PagedSequences(tokens, block_size=BLOCK, num_blocks=NUM_BLOCKS)
        self._model = model
        self._decoder = ModelDecoder(model, self.flash)

    def step(self, counts: dict[int, int]) -> float:
        """As the runner runs any step; the largest difference of the sequences' last logits."""
        batch = self.sequences.batch(counts, Sampling(temperature=0.0))
        parts, blocks = split(batch, BLOCK), on_device(batch.blocks)
        numbers = [torch.from_numpy(each) for each in (parts.cu_seqlens_q, parts.cu_blocks, parts.last_lengths)]
        chunks = Tables(*numbers, blocks[int(batch.cu_blocks[parts.num_decodes]) :])
        step = FlashStep(self.flash, on_device(batch.slot_mapping), tables_of(batch, parts.num_decodes), chunks)
        positions = on_device(batch.positions).long()[None]
        inputs = {"input_ids": on_device(batch.input_ids).long()[None], "position_ids": positions}
        logits = self._model(**inputs, use_cache=False, paged_step=step).logits[0]
        return self._error(counts, logits[(batch.cu_seqlens_q[1:] - 1).tolist()])

    def decode(self, sequences: list[int]) -> float:
        """As graphs run a step of decodes."""
        batch = self.sequences.batch(dict.fromkeys(sequences, 1), Sampling(temperature=0.0))
        logits = torch.full((len(sequences), VOCAB), float("nan"), dtype=DTYPE, device=DEVICE)
        self._decoder.decode_into(on_device(batch.input_ids).long(), tables_of(batch, len(sequences)), logits)
        return self._error(sequences, logits)

    def _error(self, sequences: Any, logits: torch.Tensor) -> float:
        expected = torch.stack([self.expected[i][self.sequences.computed[i] - 1] for i in sequences])
        return float((logits.float() - expected.float()).abs().nan_to_num(nan=1e9).max())


def tables_of(batch: Batch, count: int) -> DecodeTables:
    numbers = (batch.positions[:count], batch.slot_mapping[:count], batch.cu_blocks[: count + 1], batch.blocks)
    return DecodeTables(*map(on_device, numbers))


def on_device(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(DEVICE)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_are_those_of_transformers(name: str) -> None:
    run, tolerance = Run(name), TOLERANCE[DTYPE]
    assert run.step({0: 1, 1: 30}) < tolerance
    assert run.step({0: 1, 1: 10, 2: 150}) < tolerance
    run.flash.planned.clear()
    assert run.decode([0, 1, 2]) < tolerance
    assert run.decode([2]) < tolerance
    assert run.decode([1, 2]) < tolerance
    assert not run.flash.planned


@torch.inference_mode()
def test_logits_of_another_dtype_are_refused() -> None:
    run = Run("gemma2")
    run.step({1: 40})
    batch = run.sequences.batch({1: 1}, Sampling(temperature=0.0))
    logits = torch.empty((1, VOCAB), dtype=torch.float64, device=DEVICE)
    with pytest.raises(RuntimeError, match="the model's logits are torch"):
        run._decoder.decode_into(on_device(batch.input_ids).long(), tables_of(batch, 1), logits)
