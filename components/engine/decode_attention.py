"""Attention of single new tokens on CUDA: what the kernel of `decode_kernels.py` is given.

    attend            a fused model's decode steps: from joined projections, keys and values written on the way
    attend_written    any step's decodes: from queries that are ready, after keys and values are written

Imported on CUDA hosts only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from components.engine.attention import Shape
from components.engine.decode_kernels import decode_kernel
from components.engine.work_kernels import most_work, share

FEW_SEQUENCES = 64
"""From so many on, programs take tiles of fewer tokens, which is a kernel of its own."""

_SMALL_TILE = 64  # tokens at once
_MOST_DIM = 128  # of heads whose larger tiles fit into shared memory, and whose smaller ones into few registers
_REGISTERS = 96  # of a thread: five programs then fit on a multiprocessor, three with what the compiler would take
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
    """Where the sequences of a step stand, all int32 on the device. A step attends in one of the kernel's modes."""

    positions: torch.Tensor  # (S,): of the new token
    slots: torch.Tensor  # (S,): block id * block_size + place in the block, of the new token
    cu_blocks: torch.Tensor  # (S + 1,)
    blocks: torch.Tensor  # (cu_blocks[-1],)
    shares: dict[int | None, torch.Tensor] = field(default_factory=dict)  # by window, once made: see `share`


class DecodeAttention:
    """The kernel with one pool, and what the parts of a head leave there for the last one."""

    def __init__(
        self,
        pool: torch.Tensor,
        num_query_heads: int,
        max_sequences: int,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """`rotary`, which `attend` needs: cosines and sines, (positions, head_dim / 2) of float32."""
        _, kv_heads, _, _, _, dim = pool.shape
        self._pool = pool
        self._rotary = rotary
        self._max_sequences = max_sequences
        self._group = num_query_heads // kv_heads
        self._rows = _rows(self._group)
        device = pool.device
        programs = most_work(max_sequences, kv_heads) * kv_heads
        self._sums = torch.zeros((programs, self._rows, dim), dtype=torch.float32, device=device)
        self._marks = torch.zeros((programs, self._rows, 2), dtype=torch.float32, device=device)
        self._arrived = torch.zeros(max_sequences * kv_heads, dtype=torch.int32, device=device)

    @staticmethod
    def scratch_bytes(max_sequences: int, num_query_heads: int, kv_heads: int, dim: int) -> int:
        """What such a kernel leaves room for."""
        return most_work(max_sequences, kv_heads) * kv_heads * _rows(num_query_heads // kv_heads) * (dim + 2) * 4

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
        assert self._rotary is not None
        out = torch.empty((len(qkv), heads.num_query_heads * self._pool.shape[-1]), dtype=qkv.dtype, device=qkv.device)
        size = 1 if source is None else source.shape[1]
        q_norm, k_norm, norm_eps = heads.norms or (qkv, qkv, 0.0)
        self._launch(
            (qkv, qkv if bias is None else bias, qkv if source is None else source), out, step,
            (q_norm, k_norm, norm_eps, eps, layer, heads.scaling, size), rotary=self._rotary, window=heads.window,
            SIZE_BLOCK=triton.next_power_of_2(size), CAP=heads.softcap or 0.0, IS_SCALED=source is None,
            BIAS=bias is not None, NORM=heads.norms is not None, is_written=False,
        )  # fmt: skip
        return out

    def attend_written(
        self, layer: int, queries: torch.Tensor, shape: Shape, step: DecodeTables, out: torch.Tensor
    ) -> None:
        """Attends with queries, (S, query heads, head_dim), of tokens whose keys and values are written, into `out`.

        Both are contiguous; `step.slots` is not read.
        """
        self._launch(
            (queries, queries, queries), out, step, (queries, queries, 0.0, 0.0, layer, float(shape.scaling), 1),
            rotary=(queries, queries), window=shape.sliding_window, SIZE_BLOCK=1, CAP=shape.softcap or 0.0,
            IS_SCALED=True, BIAS=False, NORM=False, is_written=True,
        )  # fmt: skip

    def _launch(
        self, rows: tuple[torch.Tensor, ...], out: torch.Tensor, step: DecodeTables, settings: tuple[Any, ...], *,
        rotary: tuple[torch.Tensor, ...], window: int | None, is_written: bool, **constants: Any,
    ) -> None:  # fmt: skip
        _, kv_heads, num_layers, _, block_size, dim = self._pool.shape
        tile = 2 * _SMALL_TILE if len(out) < FEW_SEQUENCES and dim <= _MOST_DIM else _SMALL_TILE
        if window not in step.shares:
            step.shares[window] = share(
                step.positions, step.cu_blocks, kv_heads, is_written=is_written, window=window, tile=tile,
                max_sequences=self._max_sequences,
            )  # fmt: skip
        work = step.shares[window]
        # Those without a part come last, lest some multiprocessors get none and others two that have one.
        decode_kernel[(kv_heads, len(work))](
            *rows, self._pool, out, self._sums, self._marks, self._arrived, work, *rotary, step.slots, step.blocks,
            *settings, NUM_LAYERS=num_layers, KV_HEADS=kv_heads, GROUP=self._group, ROWS=self._rows, DIM=dim,
            BLOCK=block_size, TOKENS=tile, WINDOW=window or 0, IS_WRITTEN=is_written, num_warps=4, num_stages=2,
            maxnreg=_REGISTERS if tile == _SMALL_TILE and dim <= _MOST_DIM else None, **constants,
        )  # fmt: skip


def _rows(group: int) -> int:
    """Of the tiles that the queries of a KV head go into."""
    return int(max(_HEAD_ROWS, triton.next_power_of_2(group)))
