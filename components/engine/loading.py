"""Loading: from a model folder to a transformers model in memory, and what identifies its KV.

Weights are memory-mapped and the modules are made without initialising them, so the default model
is there in about half a second once torch and transformers are imported.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from components.kv.layout import ITEM_BYTES
from components.messages import KVLayout
from graph import LaunchError

ATTENTION = "headrace"
"""The name under which our attention is registered with transformers."""

_SAMPLE_BYTES = 1 << 16
_DUMMY_SEED = 0
_UNIFORM = "the KV layout needs the same KV heads and head size in every layer"


def load_config(folder: Path) -> PretrainedConfig:
    """The model's text configuration; raises `LaunchError` where it is not a causal LM we can serve."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot read the configuration of {folder}: {error}") from error
    _require_uniform_heads(folder, config)
    return config


def load_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, load_format: str
) -> PreTrainedModel:
    """The model in `dtype` on `device`, ready for inference, calling attention by the name `ATTENTION`."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if load_format == "dummy":
        return _for_inference(_dummy_model(config, dtype, device), device)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=ATTENTION, device_map=None, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot load the model in {folder}: {error}") from error
    return _for_inference(model, device)


def _for_inference(model: torch.nn.Module, device: torch.device) -> PreTrainedModel:
    ready: PreTrainedModel = model.to(device).eval().requires_grad_(False)  # type: ignore[assignment]
    return ready


def _dummy_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Random weights of the model's shape, made on the device, the same in every process with such a device."""
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(_DUMMY_SEED)
    try:
        with device:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, attn_implementation=ATTENTION
            )
    finally:
        torch.random.set_rng_state(generator_state)
    return model


def resolve_dtype(option: str, config: PretrainedConfig) -> torch.dtype:
    """The dtype of the KV pool and, where the device is good at it, of the computation."""
    if option == "auto":
        own = getattr(config, "dtype", None)
        return own if isinstance(own, torch.dtype) else torch.float32
    if option not in ITEM_BYTES:
        raise LaunchError(f"dtype {option!r} is unknown; it must be auto, {', '.join(ITEM_BYTES)}")
    dtype: torch.dtype = getattr(torch, option)
    return dtype


def kv_layout(config: PretrainedConfig, fingerprint: str, dtype: torch.dtype, block_size: int) -> KVLayout:
    """The layout of a rank that holds all heads."""
    heads = _num_kv_heads(config)
    return KVLayout(
        model=fingerprint,
        dtype=str(dtype).removeprefix("torch."),
        block_size=block_size,
        num_layers=config.num_hidden_layers,
        num_kv_heads=heads,
        head_dim=_head_dim(config),
        head_start=0,
        head_stop=heads,
    )


def fingerprint(folder: Path, load_format: str = "auto") -> str:
    """Identifies the weights and configuration without reading gigabytes.

    Covers the configuration, and of each weight file its size, its header (names, shapes, offsets)
    and samples of its data; "dummy" weights follow from the configuration alone.
    """
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text())
    for cosmetic in ("_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(cosmetic, None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    digest.update(load_format.encode())
    if load_format != "dummy":
        for path in sorted(folder.glob("*.safetensors")):
            _digest_weights(digest, path)
    return digest.hexdigest()[:32]


def _digest_weights(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        digest.update(file.read(header_bytes))
        for part in range(8):
            file.seek(8 + header_bytes + (size - 8 - header_bytes) * part // 8)
            digest.update(file.read(_SAMPLE_BYTES))


def _num_kv_heads(config: PretrainedConfig) -> int:
    heads: int | None = getattr(config, "num_key_value_heads", None)
    return heads if heads is not None else config.num_attention_heads


def _head_dim(config: PretrainedConfig) -> int:
    head_dim: int | None = getattr(config, "head_dim", None)
    return head_dim if head_dim is not None else config.hidden_size // config.num_attention_heads


def _require_uniform_heads(folder: Path, config: PretrainedConfig) -> None:
    """Refuses models whose layers do not all keep the same keys and values per token."""
    per_layer = getattr(getattr(config, "_heterogeneity_spec", None), "per_layer_attributes", ())
    if varying := sorted({"num_attention_heads", "num_key_value_heads", "head_dim"}.intersection(per_layer)):
        raise LaunchError(
            f"model {folder} cannot be served: {', '.join(varying)} differ between its layers; {_UNIFORM}"
        )
    reasons = [
        f"{name} is {value!r}"
        for name in ("num_key_value_heads", "head_dim", "num_attention_heads")
        if isinstance(value := getattr(config, name, None), list | tuple) and len(set(value)) > 1
    ]
    if getattr(config, "kv_lora_rank", None):
        reasons.append("it has latent attention (kv_lora_rank)")
    other = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
    kinds = set(getattr(config, "layer_types", None) or ()) - other
    if kinds:
        reasons.append(f"it has layers of type {', '.join(sorted(kinds))}")
    if getattr(config, "num_kv_shared_layers", 0):
        reasons.append("some of its layers share their KV (num_kv_shared_layers)")
    if getattr(config, "global_head_dim", None) not in (None, getattr(config, "head_dim", None)):
        reasons.append("its layers have different head sizes (global_head_dim)")
    if not hasattr(config, "num_attention_heads") or not hasattr(config, "num_hidden_layers"):
        reasons.append("its configuration names no attention heads or layers")
    if reasons:
        raise LaunchError(f"model {folder} cannot be served: {'; '.join(reasons)}; {_UNIFORM}")
