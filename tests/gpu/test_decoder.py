"""`CudaDecoder` against transformers: chunks, then decode steps of several sequences and of one.

    python -m pytest tests/gpu/test_decoder.py                     on CUDA, in bfloat16
    TRITON_INTERPRET=1 python -m pytest tests/gpu/test_decoder.py  without a GPU, in float32 (triton, numpy < 2.4)

Norms and biases are random, unlike those of models that transformers makes, so that one that is left out shows.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

pytest.importorskip("triton")

from components.engine.attention import Shape
from components.engine.decode_attention import DecodeTables
from components.engine.fuse import fuse_layers
from components.engine.fused_cuda import CudaDecoder, can_decode

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPES = [torch.float32 if IS_INTERPRETED else torch.bfloat16, torch.float16]
SLACK = 2  # errors may be so many times those that transformers makes in the same dtype

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

BLOCK, NUM_BLOCKS, LAYERS = 16, 64, 2
LENGTHS = (1, 17, 150)  # the longest in two parts
NUM_DECODED = 3
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 153,
    "pad_token_id": 0, "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "groups of three": ("LlamaConfig", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}),
    "one group": ("LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "large heads": ("LlamaConfig", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral with a window": ("MistralConfig", {"sliding_window": 24}),
    "a window of one block": ("MistralConfig", {"sliding_window": BLOCK}),
    "a window of itself": ("MistralConfig", {"sliding_window": 1}),
    "tied embeddings": ("LlamaConfig", {"tie_word_embeddings": True}),
}


def make_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**SMALL, **settings})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for part, values in model.named_parameters():
            if "norm" in part:
                values.copy_(1 + 0.3 * torch.randn_like(values))
            elif "bias" in part:
                values.copy_(0.2 * torch.randn_like(values))
    return model.to(DEVICE, dtype)  # type: ignore[arg-type]


class Chunks:
    """Attention of whole prompts over their blocks, written out."""

    def __init__(self, pool: torch.Tensor, parts: list[tuple[int, int, list[int]]]) -> None:
        self._pool, self._parts = pool, parts

    def attend(self, layer: int, queries: torch.Tensor, shape: Shape) -> torch.Tensor:
        out = torch.empty_like(queries)
        for start, stop, table in self._parts:
            count = stop - start
            kv = self._pool[table, :, layer].float().permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :count]
            keys, values = kv.repeat_interleave(queries.shape[1] // kv.shape[1], 1)
            scores = torch.einsum("qhd,hnd->hqn", queries[start:stop].float(), keys) * shape.scaling
            row, column = torch.arange(count)[:, None], torch.arange(count)[None]
            seen = column <= row
            if shape.sliding_window is not None:
                seen &= column > row - shape.sliding_window
            weights = scores.masked_fill(~seen.to(DEVICE), float("-inf")).softmax(-1)
            out[start:stop] = torch.einsum("hqn,hnd->qhd", weights, values).to(out.dtype)
        return out


class Run:
    """A decoder over random sequences, and what transformers says of them in double precision."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        reference = make_model(name, dtype)
        rng = np.random.default_rng(0)
        self.tokens = [rng.integers(1, 64, length + NUM_DECODED).tolist() for length in LENGTHS]
        self.expected = _all_logits(copy.deepcopy(reference).double(), self.tokens)
        rounded = _all_logits(reference, self.tokens)
        errors = [(ours - exact).abs().max().item() for ours, exact in zip(rounded, self.expected, strict=True)]
        self.tolerance = SLACK * max(errors)
        blocks = rng.permutation(NUM_BLOCKS).tolist()
        self.tables = []
        for tokens in self.tokens:
            count = -(-len(tokens) // BLOCK)
            self.tables.append(blocks[:count])
            blocks = blocks[count:]
        model = copy.deepcopy(reference)
        assert fuse_layers(model, model.config)
        assert can_decode(model, model.config)
        config: Any = model.config
        shape = (NUM_BLOCKS, config.num_key_value_heads, LAYERS, 2, BLOCK, config.head_dim)
        self.pool = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)  # what nobody wrote must not count
        self.decoder = CudaDecoder(model, self.pool, config.max_position_embeddings, 8)

    def prefill(self) -> float:
        """All prompts in one step; the largest difference of their last logits."""
        ids, positions, slots, parts = list[int](), list[int](), list[int](), list[tuple[int, int, list[int]]]()
        for i, length in enumerate(LENGTHS):
            parts.append((len(ids), len(ids) + length, self.tables[i]))
            ids += self.tokens[i][:length]
            positions += range(length)
            slots += [self._slot(i, at) for at in range(length)]
        step: Any = Chunks(self.pool, parts)
        hidden = self.decoder.hidden(_ints(ids).long(), _ints(positions), _ints(slots), step)
        logits = self.decoder.logits(self.decoder.norm(hidden[[stop - 1 for _, stop, _ in parts]]))
        return max(self._error(i, length - 1, row) for i, (length, row) in enumerate(zip(LENGTHS, logits, strict=True)))

    def decode(self, sequences: list[int], number: int) -> float:
        """One step of some sequences, each its `number`th; the largest difference of their logits."""
        positions = [LENGTHS[i] + number for i in sequences]
        cu_blocks = np.cumsum([0, *(len(self.tables[i]) for i in sequences)]).tolist()
        tables = DecodeTables(
            positions=_ints(positions),
            slots=_ints([self._slot(i, at) for i, at in zip(sequences, positions, strict=True)]),
            cu_blocks=_ints(cu_blocks),
            blocks=_ints([block for i in sequences for block in self.tables[i]]),
        )
        ids = _ints([self.tokens[i][at] for i, at in zip(sequences, positions, strict=True)]).long()
        logits = self.decoder.logits(self.decoder.decode(ids, tables))
        rows = zip(sequences, positions, logits, strict=True)
        return max(self._error(i, at, row) for i, at, row in rows)

    def _slot(self, sequence: int, position: int) -> int:
        return self.tables[sequence][position // BLOCK] * BLOCK + position % BLOCK

    def _error(self, sequence: int, position: int, logits: torch.Tensor) -> float:
        return float((logits.double() - self.expected[sequence][position]).abs().max())


def _all_logits(model: Any, sequences: list[list[int]]) -> list[torch.Tensor]:
    """(tokens, vocabulary) of each sequence, in double precision whatever the model's."""
    return [model(torch.tensor([tokens], device=DEVICE), use_cache=False).logits[0].double() for tokens in sequences]


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(("name", "dtype"), [*((name, DTYPES[0]) for name in MODELS), ("qwen3", DTYPES[1])], ids=str)
@torch.inference_mode()
def test_logits_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    run = Run(name, dtype)
    tolerance = run.tolerance
    assert run.prefill() < tolerance
    assert run.decode([0, 1, 2], 0) < tolerance
    for sequence in range(len(LENGTHS)):
        assert run.decode([sequence], 1) < tolerance, sequence
    assert run.decode([2, 0], 2) < tolerance
