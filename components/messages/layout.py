"""Decode and prefill to each other, before any transfer: where blocks lie, and how they are laid out."""

from __future__ import annotations

from typing import Literal

import msgspec

from graph import Message


class KVLayout(msgspec.Struct, frozen=True, array_like=True):
    """What must be known to read a rank's KV region: [block][kv_head][layer][K, V][token][head_dim].

    `num_kv_heads` counts the whole model's; a rank holds heads [head_start, head_stop).
    """

    model: str  # fingerprint of the weights and configuration
    dtype: str  # "float32", "bfloat16", "float16"
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_start: int
    head_stop: int
    version: int = 1


class RankRegion(msgspec.Struct, frozen=True, array_like=True):
    """One rank's registered KV region. The agent's name is new at every process start."""

    rank: int
    agent: str
    metadata: bytes  # the transport's own description of the agent, opaque
    layout: KVLayout
    base: int  # address of block 0
    num_blocks: int
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    device: int = 0
    probe_block: int | None = None  # no sequence's; holds the pattern of the self-test


class KVHandshake(Message, frozen=True, array_like=True, tag=True):
    """Both ways between decode and prefill, before any transfer: who I am and where my blocks lie."""

    replica: str
    boot: str
    backend: str  # "UCX", "LIBFABRIC", "memory"
    ranks: tuple[RankRegion, ...]
