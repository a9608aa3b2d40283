"""Model folders made on the spot: a configuration, and a tokenizer in which every id reads as a word. No weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4_096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
    "initializer_range": 0.02, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    "rope_theta": 500_000.0, "dtype": "bfloat16", "bos_token_id": 128_000, "eos_token_id": 128_001,
}  # fmt: skip
"""Llama-3.1-8B."""

_SMALLER = {"hidden_size": 2_048, "intermediate_size": 8_192, "num_hidden_layers": 16, "head_dim": 64}
_TINY = {
    "vocab_size": 4_096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1, "dtype": "float32", "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_8B,
    "llama-1b": {**LLAMA_8B, **_SMALLER},
    "tiny": {**LLAMA_8B, **_TINY},
}
"""`tiny` is for trying scripts on a CPU."""


def write_model(folder: Path, shape: str) -> Path:
    """Makes the folder of a shape and returns it; to be served with `load_format=dummy`."""
    config = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(config["vocab_size"])))
    return folder


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE without merges: text becomes bytes, and the ids above those read " w300", " w301", ..."""
    words = [*_byte_letters(), *(f"Ġw{id}" for id in range(256, vocab_size))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {word: id for id, word in enumerate(words)}, "merges": [],
        },
    }  # fmt: skip


def _byte_letters() -> list[str]:
    """The letters that stand for the 256 bytes in byte-level vocabularies (as in GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in letters)}
    return [letters[byte] for byte in range(256)]
