"""Faster modules for a loaded model: joined projections, whole layers of the Llama shape, prepared weights.

Everything here replaces modules by others that compute the same function:

    fuse_layers     a decoder layer of a known class becomes one `FusedLayer`: q, k and v in one matrix
                    product, gate and up in another, rotary tables made once a step. Anything else stays.
    pack_weights    on CPUs that multiply bfloat16 slowly, linear layers become `PackedLinear`
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from components.engine.attention import PagedStep, Shape

_FUSED_CLASSES = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
_FLOAT16_MAX = 65504.0


def fuse_layers(model: PreTrainedModel, config: PretrainedConfig) -> bool:
    """Fuses all decoder layers in place if all are of a known class; answers whether it did."""
    body: Any = model.base_model
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList) or getattr(config, "hidden_act", None) != "silu":
        return False
    if any(type(layer).__name__ not in _FUSED_CLASSES for layer in layers):
        return False
    body.layers = nn.ModuleList([FusedLayer(layer, index, config) for index, layer in enumerate(layers)])
    body.rotary_emb = FoldedRotary(body.rotary_emb)
    return True


class FoldedRotary(nn.Module):
    """Rotary tables, (tokens, 1, head_dim), with the sign of the rotated half moved into the sine.

    x * cos + rotate_half(x) * sin, where rotate_half([a, b]) = [-b, a], equals
    x * cos + [b, a] * [-sin_a, sin_b]: a roll instead of a negation and a concatenation per layer.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary(*args, **kwargs)
        sin = sin[0].clone()
        sin[:, : sin.shape[-1] // 2].neg_()
        return cos[0].unsqueeze(1), sin.unsqueeze(1)


class FusedLayer(nn.Module):
    """A decoder layer of the Llama shape: norm, attention, norm, gated MLP, each added to the residual."""

    def __init__(self, layer: Any, index: int, config: PretrainedConfig) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.head_dim: int = attention.head_dim
        self.num_heads: int = config.num_attention_heads
        self.num_rotated = config.num_attention_heads + config.num_key_value_heads
        self.shape = Shape(attention.scaling, _sliding_window(attention, config))
        self.qkv = _join(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = attention.o_proj
        self.gate_up = _join(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj
        self.q_norm, self.k_norm = _norm(attention, "q_norm"), _norm(attention, "k_norm")
        self.attention_norm, self.mlp_norm = RMSNorm(layer.input_layernorm), RMSNorm(layer.post_attention_layernorm)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged_step: PagedStep,
        **_: Any,
    ) -> torch.Tensor:
        """Hidden states of one flattened row: (1, tokens, hidden_size)."""
        residual = hidden_states[0]
        residual = residual + self.o(self._attend(self.attention_norm(residual), position_embeddings, paged_step))
        gate, up = self.gate_up(self.mlp_norm(residual)).chunk(2, dim=-1)
        added: torch.Tensor = residual.add_(self.down(F.silu(gate).mul_(up)))
        return added[None]

    def _attend(self, normed: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], step: PagedStep) -> torch.Tensor:
        cos, sin = rotary
        qkv = self.qkv(normed).view(normed.shape[0], -1, self.head_dim)
        plain = qkv[:, : self.num_rotated]
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = plain.split((self.num_heads, self.num_rotated - self.num_heads), dim=1)
            plain = torch.cat((self.q_norm(queries), self.k_norm(keys)), dim=1)
        rotated = torch.addcmul(plain * cos, plain.roll(self.head_dim // 2, -1), sin)
        step.write(self.index, rotated[:, self.num_heads :], qkv[:, self.num_rotated :])
        return step.attend(self.index, rotated[:, : self.num_heads], self.shape).flatten(1)


class RMSNorm(nn.Module):
    """Root mean square norm in one kernel, from a module of transformers' Llama kind."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps: float = norm.variance_epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = F.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)
        return normed


def _norm(attention: nn.Module, name: str) -> RMSNorm | None:
    norm = getattr(attention, name, None)
    return None if norm is None else RMSNorm(norm)


def _sliding_window(attention: nn.Module, config: PretrainedConfig) -> int | None:
    """The layer's window: its own attribute where the class has one, else the model's."""
    window: int | None = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return window


def _join(*parts: nn.Linear) -> nn.Linear:
    """One linear layer whose output is the parts' outputs side by side."""
    first = parts[0]
    outputs = sum(part.out_features for part in parts)
    joined = nn.Linear(first.in_features, outputs, bias=first.bias is not None, device="meta")
    joined.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    return joined


# --- weights for CPUs that multiply bfloat16 slowly


def should_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether 16-bit weights are better packed for float32 arithmetic than multiplied as they are.

    True on x86 CPUs without bfloat16 instructions, where torch emulates them (17 GFLOP/s for 16
    rows on two Zen 3 cores, against about 100 packed).
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def pack_weights(model: PreTrainedModel) -> None:
    """Packs linear layers in place and turns the rest to float32, activations included.

    Weights are kept in float16, which holds every bfloat16 between 6e-5 and 65504 exactly and smaller
    ones to 3e-8; products and sums are float32. Embeddings stay as they are and are widened on look-up.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.abs().max() <= _FLOAT16_MAX:
                setattr(parent, name, PackedLinear(child))
            elif type(child) is nn.Embedding:
                setattr(parent, name, WideEmbedding(child))
    model.float()  # type: ignore[no-untyped-call]


class PackedLinear(nn.Module):
    """A linear layer with packed float16 weights and float32 inputs and outputs (FBGEMM)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.float()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = torch.ops.quantized.linear_prepack_fp16(linear.weight.float(), bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(inputs, self._packed)
        return outputs


class WideEmbedding(nn.Module):
    """An embedding that stays in its 16-bit dtype and gives float32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self._weight = embedding.weight.detach()  # not a parameter: the model's dtype does not concern it

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self._weight).float()
