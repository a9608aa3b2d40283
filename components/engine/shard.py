"""Tensor parallelism: cuts a loaded model down to one rank's part, in place.

q, k and v by heads, gate and up by rows; o and down by the columns that belong to those, so that each
rank has a summand of their output, and `RowParallel` adds them up. Two sums a layer are all that ranks
exchange. Embeddings and head stay whole: logits are made where tokens are chosen, on rank 0.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from components.engine.collective import Ranks
from components.engine.ranges import Share, cut, share_heads
from graph import LaunchError

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


class RowParallel(nn.Module):
    """A linear layer of which each rank has some input columns; its output is the ranks' sum."""

    def __init__(self, linear: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.linear = linear
        self._ranks = ranks

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._ranks.add_up(self.linear(inputs))


def own_share(config: PretrainedConfig, ranks: Ranks) -> Share:
    """This rank's heads."""
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return share_heads(config.num_attention_heads, num_kv_heads, ranks.size)[ranks.rank]


def shard_model(model: PreTrainedModel, config: PretrainedConfig, ranks: Ranks) -> PretrainedConfig:
    """Keeps this rank's part of every decoder layer; returns the configuration with the heads that are left.

    Raises `LaunchError` for models whose layers have another shape than attention and gated MLP.
    """
    share = own_share(config, ranks)
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise LaunchError(f"{type(model).__name__} cannot be divided among ranks: it has no list of layers; use tp=1")
    for layer in layers:
        _require_known_shape(model, layer)
        _shard_attention(layer.self_attn, share, ranks)
        _shard_mlp(layer.mlp, ranks)
    local = copy.deepcopy(config)
    local.num_attention_heads, local.num_key_value_heads = share.num_query_heads, share.num_kv_heads
    return local


def _require_known_shape(model: nn.Module, layer: Any) -> None:
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    is_known = all(isinstance(getattr(attention, name, None), nn.Linear) for name in _ATTENTION)
    is_known = is_known and all(isinstance(getattr(mlp, name, None), nn.Linear) for name in _MLP)
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    is_by_head = all(norm is None or norm.weight.numel() == attention.head_dim for norm in norms)
    if not is_known or not is_by_head or getattr(attention, "sinks", None) is not None:
        raise LaunchError(
            f"{type(model).__name__} cannot be divided among ranks: its layers are not attention by heads and a "
            "gated MLP; use tp=1"
        )


def _shard_attention(attention: Any, share: Share, ranks: Ranks) -> None:
    dim = attention.head_dim
    query = slice(share.query_start * dim, share.query_stop * dim)
    kv = slice(share.kv_start * dim, share.kv_stop * dim)
    _keep_rows(attention.q_proj, query)
    _keep_rows(attention.k_proj, kv)
    _keep_rows(attention.v_proj, kv)
    attention.o_proj = _keep_columns(attention.o_proj, query, ranks)


def _shard_mlp(mlp: Any, ranks: Ranks) -> None:
    rows = slice(*cut(mlp.gate_proj.out_features, ranks.size)[ranks.rank])
    _keep_rows(mlp.gate_proj, rows)
    _keep_rows(mlp.up_proj, rows)
    mlp.down_proj = _keep_columns(mlp.down_proj, rows, ranks)


def _keep_rows(linear: nn.Linear, rows: slice) -> None:
    linear.weight = _kept(linear.weight[rows])
    linear.out_features = linear.weight.shape[0]
    if linear.bias is not None:
        linear.bias = _kept(linear.bias[rows])


def _keep_columns(linear: nn.Linear, columns: slice, ranks: Ranks) -> RowParallel:
    linear.weight = _kept(linear.weight[:, columns])
    linear.in_features = linear.weight.shape[1]
    if ranks.rank > 0:
        linear.register_parameter("bias", None)  # added once
    return RowParallel(linear, ranks)


def _kept(part: torch.Tensor) -> nn.Parameter:
    """A copy, so that the whole can be freed."""
    return nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
