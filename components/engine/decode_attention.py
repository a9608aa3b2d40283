"""Attention of decode steps on CUDA: what the kernel of `decode_kernels.py` is given. Imported on CUDA hosts only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from components.engine.decode_kernels import decode_kernel

_PROGRAMS = 256  # about as many as keep a GPU busy; fewer sequences are attended for in more parts
_FEW_SEQUENCES = 64
_HEAD_ROWS = 16  # the least that a tensor core takes


@dataclass(frozen=True)
class Heads:
    """How a layer attends, beside its weights."""

    num_query_heads: int
    scaling: float
    window: int | None  # keys a query sees, its own included
    softcap: float | None
    norms: tuple[torch.Tensor, torch.Tensor, float] | None  # of queries and keys: weights (head_dim,), and epsilon


@dataclass(frozen=True)
class DecodeTables:
    """Where the sequences of a step stand, all int32 on the device."""

    positions: torch.Tensor  # (S,): of the new token
    slots: torch.Tensor  # (S,): block id * block_size + place in the block, of the new token
    cu_blocks: torch.Tensor  # (S + 1,)
    blocks: torch.Tensor  # (cu_blocks[-1],)


class DecodeAttention:
    """The kernel with one pool, and what the parts of a head leave there for the last one."""

    def __init__(
        self, pool: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], num_query_heads: int, max_sequences: int
    ) -> None:
        """`tables`: cosines and sines, (positions, head_dim / 2) of float32."""
        _, kv_heads, _, _, _, dim = pool.shape
        self._pool = pool
        self._rotary = tables
        self._rows = max(_HEAD_ROWS, triton.next_power_of_2(num_query_heads // kv_heads))
        programs = max(2 * _PROGRAMS, kv_heads)
        device = pool.device
        self._sums = torch.zeros((programs, self._rows, dim), dtype=torch.float32, device=device)
        self._marks = torch.zeros((programs, self._rows, 2), dtype=torch.float32, device=device)
        self._arrived = torch.zeros(max_sequences * kv_heads, dtype=torch.int32, device=device)

    def attend(
        self,
        qkv: torch.Tensor,
        bias: torch.Tensor | None,
        layer: int,
        heads: Heads,
        step: DecodeTables,
        *,
        source: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Attends with the new tokens, writes their keys and values: (S, query heads * head_dim).

        `qkv` (S, (query heads + 2 kv heads) * head_dim): joined projections, to be scaled by what `source`, (S, size),
        is to be normed by, unless it is None, and added to `bias`.
        """
        _, kv_heads, num_layers, _, block_size, dim = self._pool.shape
        sequences = len(qkv)
        out = torch.empty((sequences, heads.num_query_heads * dim), dtype=qkv.dtype, device=qkv.device)
        size = 1 if source is None else source.shape[1]
        q_norm, k_norm, norm_eps = heads.norms or (qkv, qkv, 0.0)
        num_parts = self._num_parts(sequences, kv_heads)
        decode_kernel[(sequences, kv_heads, num_parts)](
            qkv, qkv if bias is None else bias, qkv if source is None else source, self._pool, out, self._sums,
            self._marks, self._arrived, *self._rotary, step.positions, step.slots, step.cu_blocks, step.blocks, q_norm,
            k_norm, norm_eps, eps, layer, heads.scaling, size, SIZE_BLOCK=triton.next_power_of_2(size),
            NUM_LAYERS=num_layers, KV_HEADS=kv_heads, GROUP=heads.num_query_heads // kv_heads, ROWS=self._rows, DIM=dim,
            BLOCK=block_size, TOKENS=128 if sequences < _FEW_SEQUENCES and dim <= 128 else 64, PARTS=num_parts,
            WINDOW=heads.window or 0, CAP=heads.softcap or 0.0, IS_SCALED=source is None, BIAS=bias is not None,
            NORM=heads.norms is not None, num_warps=4, num_stages=2,
        )  # fmt: skip
        return out

    def _num_parts(self, sequences: int, kv_heads: int) -> int:
        """A power of two that makes about as many programs as keep the GPU busy; one where sequences do."""
        return int(triton.next_power_of_2(max(1, _PROGRAMS // (sequences * kv_heads))))
