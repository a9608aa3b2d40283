"""The KV layout in numbers: shape and bytes of a rank's block. Torch-free."""

from __future__ import annotations

from components.messages import KVLayout

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element of each dtype a pool may have."""


def block_shape(layout: KVLayout) -> tuple[int, int, int, int, int]:
    """(kv_heads of this rank, layers, K and V, tokens, head_dim)."""
    heads = layout.head_stop - layout.head_start
    return (heads, layout.num_layers, 2, layout.block_size, layout.head_dim)


def head_bytes(layout: KVLayout) -> int:
    """Bytes of one KV head in one block: all layers, K and V."""
    return layout.num_layers * 2 * layout.block_size * layout.head_dim * ITEM_BYTES[layout.dtype]


def block_bytes(layout: KVLayout) -> int:
    """Bytes of one block of this rank: all its heads."""
    return (layout.head_stop - layout.head_start) * head_bytes(layout)
