"""Triton kernels of a layer: norms, rotary with the KV write, gated activation.

Each wrapper below a kernel says what it computes; all arithmetic is float32, whatever the tensors' dtype.
Imported on CUDA hosts only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS_PER_PROGRAM = 8


@triton.jit
def _rms_norm_kernel(x, residual, weight, out, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    values = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, (values * scale * factors).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm of x, (tokens, size); with `residual`, x is added to it in place first and the sum is normed."""
    tokens, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    target = x if residual is None else residual
    _rms_norm_kernel[(tokens,)](
        x,
        target,
        weight,
        out,
        size,
        eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
    )
    return out


@triton.jit
def _rotary_write_kernel(
    qkv, queries, pool, cos, sin, positions, slots, q_norm, k_norm, eps, layer, num_layers, block_size,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, HALF)
    total: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    dim: tl.constexpr = 2 * HALF
    valid = (heads < total)[:, None] & (at < HALF)[None, :]
    is_query = (heads < Q_HEADS)[:, None]
    is_value = (heads >= Q_HEADS + KV_HEADS)[:, None]
    source = qkv + token * total * dim + heads[:, None] * dim + at[None, :]
    first = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=valid, other=0.0).to(tl.float32)
    plain_first, plain_second = first, second
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1) / dim
        scale = (1.0 / tl.sqrt(squares + eps))[:, None]
        of_query = is_query & (at < HALF)[None, :]
        other = (heads >= Q_HEADS)[:, None] & (at < HALF)[None, :]
        places = tl.zeros([HEADS, HALF], tl.int32) + at[None, :]
        factor_1 = tl.load(q_norm + places, mask=of_query, other=0.0).to(tl.float32)
        factor_1 += tl.load(k_norm + places, mask=other, other=0.0).to(tl.float32)
        factor_2 = tl.load(q_norm + places + HALF, mask=of_query, other=0.0).to(tl.float32)
        factor_2 += tl.load(k_norm + places + HALF, mask=other, other=0.0).to(tl.float32)
        first = first * scale * factor_1
        second = second * scale * factor_2
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * HALF + at)[None, :]
    s = tl.load(sin + position * HALF + at)[None, :]
    turned_first = tl.where(is_value, plain_first, first * c - second * s)
    turned_second = tl.where(is_value, plain_second, second * c + first * s)
    out = queries + token * Q_HEADS * dim + heads[:, None] * dim + at[None, :]
    tl.store(out, turned_first.to(queries.dtype.element_ty), mask=valid & is_query)
    tl.store(out + HALF, turned_second.to(queries.dtype.element_ty), mask=valid & is_query)
    slot = tl.load(slots + token).to(tl.int64)
    side = tl.where(heads >= Q_HEADS + KV_HEADS, 1, 0)
    head = heads - Q_HEADS - side * KV_HEADS
    piece = (((slot // block_size) * KV_HEADS + head) * num_layers + layer) * 2 + side
    kept = pool + ((piece * block_size + slot % block_size) * dim)[:, None] + at[None, :]
    tl.store(kept, turned_first.to(pool.dtype.element_ty), mask=valid & (heads >= Q_HEADS)[:, None])
    tl.store(kept + HALF, turned_second.to(pool.dtype.element_ty), mask=valid & (heads >= Q_HEADS)[:, None])


def rotary_write(
    qkv: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    tables: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_query_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor:
    """Norms and rotates queries and keys of joined projections, writes keys and values into their slots.

    `qkv` (tokens, (query heads + 2 kv heads) * head_dim), `pool` the blocks of the KV layout, `tables`
    cosines and sines, (positions, head_dim / 2) of float32. Returns the queries, (tokens, heads, head_dim).
    """
    _, kv_heads, num_layers, _, block_size, dim = pool.shape
    tokens = qkv.shape[0]
    queries = torch.empty((tokens, num_query_heads, dim), dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm, eps = norms if norms is not None else (qkv, qkv, 0.0)
    grid = (tokens, triton.cdiv(num_query_heads + 2 * kv_heads, _HEADS_PER_PROGRAM))
    _rotary_write_kernel[grid](
        qkv, queries, pool, tables[0], tables[1], positions, slots, q_norm, k_norm, eps, layer, num_layers, block_size,
        Q_HEADS=num_query_heads, KV_HEADS=kv_heads, HALF=dim // 2, HEADS=_HEADS_PER_PROGRAM, NORM=norms is not None,
        num_warps=2,
    )  # fmt: skip
    return queries


@triton.jit
def _silu_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of the joined (tokens, 2 * size): (tokens, size)."""
    tokens, double = gate_up.shape
    size = double // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _silu_mul_kernel[(tokens, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block, num_warps=4)
    return out
