"""Whole decoders of the Llama shape for CUDA: the joined projections of `fuse.py` between Triton kernels.

A layer is nine kernels: norm with the residual's sum, q/k/v product, rotary with the KV write, attention,
output product, norm with sum, gate/up product, SiLU times up, down product.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig, PreTrainedModel

from components.engine.attention import PagedStep
from components.engine.fuse import FoldedRotary, FusedLayer, RMSNorm
from components.engine.layer_kernels import rms_norm, rotary_write, silu_mul

_FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # their tables do not depend on the sequence's length


class CudaDecoder:
    """A fused transformers model from token ids to hidden states, and from those to logits."""

    def __init__(self, model: PreTrainedModel, pool: torch.Tensor, max_model_len: int) -> None:
        """`model` has been through `fuse_layers`, and `can_decode` said yes."""
        body: Any = model.base_model
        self._embedding: torch.Tensor = body.embed_tokens.weight
        self.layers: list[FusedLayer] = list(body.layers)
        self._norms = [RMSNorm(body.norm) if layer is None else layer.attention_norm for layer in [*self.layers, None]]
        self._head: torch.Tensor = model.lm_head.weight
        self._pool = pool
        self._tables = _rotary_tables(body.rotary_emb, max_model_len, pool.device)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """Normed hidden states, (tokens, size), of `ids`, (tokens,); keys and values go into `slots`."""
        residual = F.embedding(ids, self._embedding)
        normed = rms_norm(residual, self._norms[0].weight, self._norms[0].eps)
        for layer, following in zip(self.layers, self._norms[1:], strict=True):
            queries = rotary_write(
                layer.qkv(normed),
                self._pool,
                layer.index,
                self._tables,
                positions,
                slots,
                num_query_heads=layer.num_heads,
                norms=_head_norms(layer),
            )
            delta = layer.o(step.attend(layer.index, queries, layer.shape).flatten(1))
            normed = rms_norm(delta, layer.mlp_norm.weight, layer.mlp_norm.eps, residual=residual)
            delta = layer.down(silu_mul(layer.gate_up(normed)))
            normed = rms_norm(delta, following.weight, following.eps, residual=residual)
        return normed

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of some rows of hidden states, (rows, vocabulary)."""
        return torch.mm(hidden, self._head.t(), out=out)


def can_decode(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Whether a model that `fuse_layers` took has nothing else that `CudaDecoder` does not know."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    is_whole = not isinstance(rope, dict) or rope.get("partial_rotary_factor", 1.0) == 1.0
    head = getattr(model, "lm_head", None)
    return kind in _FIXED_ROPES and is_whole and isinstance(head, torch.nn.Linear) and head.bias is None


def _head_norms(layer: FusedLayer) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps


def _rotary_tables(rotary: Any, max_model_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each (max_model_len, head_dim / 2) of float32, as the model's own module makes them."""
    module = rotary.rotary if isinstance(rotary, FoldedRotary) else rotary
    like = torch.empty(0, dtype=torch.float32, device=device)
    cos, sin = module(like, torch.arange(max_model_len, device=device)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()
