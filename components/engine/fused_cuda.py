"""Whole decoders of the Llama shape for CUDA: the joined projections of `fuse.py` and Triton kernels between them.

The norms' weights are multiplied into the products behind them, what is left of a norm is a factor for each row,
and the residual is added by the product before. So a layer's decode step is five kernels: q/k/v product, attention with
rotary and the KV write, output product, gate/up product with the activation, down product. One sequence alone has
all products in Triton, many sequences the activation in a kernel of its own; chunks take three more for that, the
factors and the rotary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig, PreTrainedModel

from components.engine.attention import PagedStep
from components.engine.decode_attention import DecodeAttention, DecodeTables, Heads
from components.engine.fuse import FoldedRotary, FusedLayer, RMSNorm
from components.engine.gated_kernels import gated, takes
from components.engine.layer_kernels import rms_norm, rotary_write, row_scales, silu_mul
from components.engine.products import Job, Products
from components.engine.single_row_kernels import single_row

_FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # their tables do not depend on the sequence's length


class CudaDecoder:
    """A fused transformers model from token ids to hidden states, and from those to logits."""

    def __init__(
        self,
        model: PreTrainedModel,
        pool: torch.Tensor,
        max_model_len: int,
        max_sequences: int,
        products: Products | None = None,
    ) -> None:
        """`model` has been through `fuse_layers`, and `can_decode` said yes. Decode steps: up to `max_sequences`."""
        self._products = products or Products()
        body: Any = model.base_model
        self._embedding: torch.Tensor = body.embed_tokens.weight
        self.layers: list[FusedLayer] = list(body.layers)
        for layer in self.layers:
            _fold(layer.attention_norm, layer.qkv)
            _fold(layer.mlp_norm, layer.gate_up)
        self._heads = [_heads(layer) for layer in self.layers]
        self._norm = RMSNorm(body.norm)
        self._head: torch.Tensor = model.lm_head.weight
        self._pool = pool
        self._tables = _rotary_tables(body.rotary_emb, max_model_len, pool.device)
        self._attention = DecodeAttention(pool, self.layers[0].num_heads, max_sequences, self._tables)

    @property
    def query_shape(self) -> tuple[int, int]:
        """Query heads and what each takes."""
        return self.layers[0].num_heads, self.layers[0].head_dim

    def choose_products(self, decode_rows: list[int], chunk_rows: list[int], report: Callable[[str], None]) -> None:
        """Finds the fastest products for steps of so many sequences, and of so many tokens."""
        rows = sorted({*decode_rows, *chunk_rows} - {1}, reverse=True)  # the others share the largest one's memory
        kinds = [
            ([layer.qkv.weight for layer in self.layers], False),
            ([layer.o.weight for layer in self.layers], True),
            ([layer.gate_up.weight for layer in self.layers], False),
            ([layer.down.weight for layer in self.layers], True),
        ]
        jobs = [Job(weights, is_added, rows) for weights, is_added in kinds]
        self._products.tune([*jobs, Job([self._head], False, decode_rows[::-1])], report)
        torch.cuda.empty_cache()  # of what the search took

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The residual that the first layer starts with, (tokens, size)."""
        return F.embedding(ids, self._embedding)

    def decode(self, ids: torch.Tensor, step: DecodeTables) -> torch.Tensor:
        """Normed hidden states, (S, size), of one new token for each sequence."""
        residual = self.embed(ids)
        run = self._decode_one if len(ids) == 1 else self._decode_many
        for layer, heads in zip(self.layers, self._heads, strict=True):
            run(layer, heads, residual, step)
        return self.norm(residual)

    def decode_into(self, ids: torch.Tensor, step: DecodeTables, logits: torch.Tensor) -> None:
        """The same up to the logits, (S, vocabulary)."""
        self.logits(self.decode(ids, step), out=logits)

    def _decode_one(self, layer: FusedLayer, heads: Heads, residual: torch.Tensor, step: DecodeTables) -> None:
        eps, qkv, gate_up = layer.attention_norm.eps, layer.qkv, layer.gate_up
        joined = single_row(residual, qkv.weight, qkv.bias, eps=eps)
        attended = self._attention.attend(joined, None, layer.index, heads, step, source=None, eps=eps)
        single_row(attended, layer.o.weight, layer.o.bias, add_to=residual)
        activated = single_row(residual, gate_up.weight, gate_up.bias, eps=layer.mlp_norm.eps, gated=True)
        single_row(activated, layer.down.weight, layer.down.bias, add_to=residual)

    def _decode_many(self, layer: FusedLayer, heads: Heads, residual: torch.Tensor, step: DecodeTables) -> None:
        eps, qkv, gate_up = layer.attention_norm.eps, layer.qkv, layer.gate_up
        x, source = _product_input(residual, layer.attention_norm)
        joined = self._products(x, qkv.weight)
        attended = self._attention.attend(joined, qkv.bias, layer.index, heads, step, source=source, eps=eps)
        self._add_product(residual, attended, layer.o)
        if takes(len(residual), gate_up.weight):
            activated = gated(residual, gate_up.weight, gate_up.bias, layer.mlp_norm.eps)
        else:
            x, source = _product_input(residual, layer.mlp_norm)
            activated = silu_mul(self._products(x, gate_up.weight), source, gate_up.bias, layer.mlp_norm.eps)
        self._add_product(residual, activated, layer.down)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """Hidden states before the last norm, (tokens, size), of any step; keys and values go into `slots`."""
        residual = self.embed(ids)
        for index, layer in enumerate(self.layers):
            queries = self.before_attention(index, residual, positions, slots)
            attended = step.attend(layer.index, queries, layer.shape)
            self.after_attention(index, residual, attended)
        return residual

    def before_attention(
        self,
        index: int,
        residual: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A layer up to its queries, (tokens, heads, head_dim), in `queries` if given; writes keys and values."""
        layer, heads = self.layers[index], self._heads[index]
        x, scales = _chunk_input(residual, layer.attention_norm)
        return rotary_write(
            self._products(x, layer.qkv.weight),
            scales,
            layer.qkv.bias,
            self._pool,
            layer.index,
            self._tables,
            positions,
            slots,
            num_query_heads=heads.num_query_heads,
            norms=heads.norms,
            queries=queries,
        )

    def after_attention(self, index: int, residual: torch.Tensor, attended: torch.Tensor) -> None:
        """The rest of a layer, added to the residual in place."""
        layer = self.layers[index]
        self._add_product(residual, attended.flatten(1), layer.o)
        x, scales = _chunk_input(residual, layer.mlp_norm)
        joined = self._products(x, layer.gate_up.weight)
        self._add_product(residual, silu_mul(joined, scales, layer.gate_up.bias, layer.mlp_norm.eps), layer.down)

    def _add_product(self, residual: torch.Tensor, x: torch.Tensor, linear: torch.nn.Linear) -> None:
        if linear.bias is not None:
            residual.add_(linear.bias)
        self._products.add(residual, x, linear.weight)

    def norm(self, residual: torch.Tensor) -> torch.Tensor:
        """The last norm."""
        return rms_norm(residual, self._norm.weight, self._norm.eps)

    def logits(self, normed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of some rows of normed hidden states, (rows, vocabulary)."""
        return self._products(normed, self._head, out)


def can_decode(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Whether a model that `fuse_layers` took has nothing else that `CudaDecoder` does not know."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    is_whole = not isinstance(rope, dict) or rope.get("partial_rotary_factor", 1.0) == 1.0
    head = getattr(model, "lm_head", None)
    return kind in _FIXED_ROPES and is_whole and isinstance(head, torch.nn.Linear) and head.bias is None


def _fold(norm: RMSNorm, linear: torch.nn.Linear) -> None:
    """Multiplies a norm's weight into the product behind it, and leaves ones in its place: the layer stays the same."""
    with torch.no_grad():
        linear.weight.mul_(norm.weight)
    norm.weight = torch.nn.Parameter(torch.ones_like(norm.weight), requires_grad=False)


def _product_input(residual: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is multiplied where a norm was folded, and what the product's rows are to be scaled by the norm of.

    The residual, as it is; in float16, whose products would overflow where the residual is large, it is normed first.
    """
    if residual.dtype is torch.float16:
        return rms_norm(residual, norm.weight, norm.eps), None
    return residual, residual


def _chunk_input(residual: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the scales themselves, (tokens,) of float32."""
    x, source = _product_input(residual, norm)
    if source is None:
        return x, torch.ones(len(x), dtype=torch.float32, device=x.device)
    return x, row_scales(source, norm.eps)


def _heads(layer: FusedLayer) -> Heads:
    norms = None
    if layer.q_norm is not None and layer.k_norm is not None:
        norms = (layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
    return Heads(layer.num_heads, layer.shape.scaling, layer.shape.sliding_window, layer.shape.softcap, norms)


def _rotary_tables(rotary: Any, max_model_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each (max_model_len, head_dim / 2) of float32, as the model's own module makes them."""
    module = rotary.rotary if isinstance(rotary, FoldedRotary) else rotary
    like = torch.empty(0, dtype=torch.float32, device=device)
    cos, sin = module(like, torch.arange(max_model_len, device=device)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()
