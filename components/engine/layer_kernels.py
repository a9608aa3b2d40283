"""Triton kernels of a step beside its products and attention: ids, norms, rotary with the KV write, gated activation.

A layer's norms are never written out: their weights stand in the products that follow, and what is left, a factor
for each row, is applied to what the products give (`row_scales`, or in the kernels that read it). All arithmetic is
float32, whatever the tensors' dtype. Imported on CUDA hosts only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS_PER_PROGRAM = 8
_IDS_PER_PROGRAM = 256
_GATED_PER_PROGRAM = 2048


@triton.jit(do_not_specialize=["count"])
def _fed_ids_kernel(given, fed, last_tokens, ids, count, PART: tl.constexpr):
    at = tl.program_id(0) * PART + tl.arange(0, PART)
    place = tl.load(fed + at, mask=at < count, other=-1)
    token = tl.load(given + at, mask=at < count, other=0).to(tl.int64)
    token = tl.where(place >= 0, tl.load(last_tokens + place, mask=place >= 0, other=0), token)
    tl.store(ids + at, token, mask=at < count)


def fed_ids(given: torch.Tensor, fed: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """The ids of a step's tokens, (tokens,) of int64: those given, or what the step before chose at `fed` if that is 0
    or more; both (tokens,) of int32."""
    ids = torch.empty(len(given), dtype=torch.int64, device=given.device)
    _fed_ids_kernel[(triton.cdiv(len(given), _IDS_PER_PROGRAM),)](
        given, fed, last_tokens, ids, len(given), PART=_IDS_PER_PROGRAM, num_warps=4
    )
    return ids


@triton.jit
def scale_of(row, size: tl.constexpr, eps, BLOCK: tl.constexpr):
    """One over the root mean square of `size` values."""
    at = tl.arange(0, BLOCK)
    values = tl.load(row + at, mask=at < size, other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / size + eps)


@triton.jit
def _row_scales_kernel(x, scales, size: tl.constexpr, eps, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    tl.store(scales + token, scale_of(x + token * size, size, eps, BLOCK))


def row_scales(x: torch.Tensor, eps: float) -> torch.Tensor:
    """One over the root mean square of each row of x, (tokens, size): (tokens,) of float32."""
    tokens, size = x.shape
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _row_scales_kernel[(tokens,)](x, scales, size, eps, BLOCK=block, num_warps=_warps(block))
    return scales


@triton.jit
def _rms_norm_kernel(x, weight, out, size: tl.constexpr, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    values = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / size + eps)
    tl.store(out + row + at, (values * scale * factors).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of x, (tokens, size)."""
    tokens, size = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _rms_norm_kernel[(tokens,)](x, weight, out, size, eps, BLOCK=block, num_warps=_warps(block))
    return out


@triton.jit
def rotated(
    row, scale, bias, factors, angles, norm_eps, dims, DIM: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr
):
    """Heads of a token, scaled, biased, normed and rotated. `row` and `bias` point to the heads' first values.

    `dims` are places within a head as the last axis of `row`; `angles` point to the position's cosines and sines.
    """
    half: tl.constexpr = DIM // 2
    partners = (dims + half) % DIM
    own = tl.load(row + dims).to(tl.float32) * scale
    other = tl.load(row + partners).to(tl.float32) * scale
    if BIAS:
        own += tl.load(bias + dims).to(tl.float32)
        other += tl.load(bias + partners).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(own * own, axis=-1, keep_dims=True) / DIM + norm_eps)
        own = own * factor * tl.load(factors + dims).to(tl.float32)
        other = other * factor * tl.load(factors + partners).to(tl.float32)
    turn = tl.load(angles[1] + dims % half)
    return own * tl.load(angles[0] + dims % half) + other * tl.where(dims < half, -turn, turn)


@triton.jit
def scaled(row, scale, bias, dims, BIAS: tl.constexpr):
    """Heads of a token, scaled and biased."""
    values = tl.load(row + dims).to(tl.float32) * scale
    if BIAS:
        values += tl.load(bias + dims).to(tl.float32)
    return values


@triton.jit(do_not_specialize=["layer"])
def _rotary_write_kernel(
    qkv, scales, bias, queries, pool, cos, sin, positions, slots, q_norm, k_norm, norm_eps, layer, num_layers,
    block_size, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    total: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    first = tl.program_id(1) * HEADS
    heads = tl.minimum(first + tl.arange(0, HEADS), total - 1)[:, None]  # the last one more than once, if need be
    dims = tl.zeros([HEADS, DIM], tl.int32) + tl.arange(0, DIM)[None, :]
    row = qkv + (token * total + heads) * DIM
    scale = tl.load(scales + token)
    position = tl.load(positions + token).to(tl.int64)
    angles = (cos + position * (DIM // 2), sin + position * (DIM // 2))
    factors = tl.where(heads < Q_HEADS, q_norm, k_norm)
    turned = rotated(row, scale, bias + heads * DIM, factors, angles, norm_eps, dims, DIM, BIAS, NORM)
    plain = scaled(row, scale, bias + heads * DIM, dims, BIAS)
    values = tl.where(heads >= Q_HEADS + KV_HEADS, plain, turned)
    is_query = (heads < Q_HEADS) & (dims < DIM)
    tl.store(queries + (token * Q_HEADS + heads) * DIM + dims, values.to(queries.dtype.element_ty), mask=is_query)
    slot = tl.load(slots + token).to(tl.int64)
    side = tl.where(heads >= Q_HEADS + KV_HEADS, 1, 0)
    head = heads - Q_HEADS - side * KV_HEADS
    piece = (((slot // block_size) * KV_HEADS + head) * num_layers + layer) * 2 + side
    kept = pool + (piece * block_size + slot % block_size) * DIM + dims
    tl.store(kept, values.to(pool.dtype.element_ty), mask=(heads >= Q_HEADS) & (dims < DIM))


def rotary_write(
    qkv: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    layer: int,
    tables: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_query_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    queries: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales, norms and rotates queries and keys of joined projections, writes keys and values into their slots.

    `qkv` (tokens, (query heads + 2 kv heads) * head_dim), to be multiplied by `scales`, (tokens,), and added to
    `bias`; `pool` the blocks of the KV layout, `tables` cosines and sines, (positions, head_dim / 2) of float32.
    Returns the queries, (tokens, heads, head_dim), in `queries` if it is given.
    """
    _, kv_heads, num_layers, _, block_size, dim = pool.shape
    tokens = qkv.shape[0]
    if queries is None:
        queries = torch.empty((tokens, num_query_heads, dim), dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm, norm_eps = norms if norms is not None else (qkv, qkv, 0.0)
    grid = (tokens, triton.cdiv(num_query_heads + 2 * kv_heads, _HEADS_PER_PROGRAM))
    _rotary_write_kernel[grid](
        qkv, scales, qkv if bias is None else bias, queries, pool, *tables, positions, slots, q_norm, k_norm, norm_eps,
        layer, num_layers, block_size, Q_HEADS=num_query_heads, KV_HEADS=kv_heads, DIM=dim, HEADS=_HEADS_PER_PROGRAM,
        BIAS=bias is not None, NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return queries


@triton.jit
def _silu_mul_kernel(
    gate_up, source, bias, out, width, size: tl.constexpr, eps, PART: tl.constexpr, BLOCK: tl.constexpr,
    IS_SCALED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(source + row) if IS_SCALED else scale_of(source + row * size, size, eps, BLOCK)
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32) * scale
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32) * scale
    if BIAS:
        gate += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, source: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """silu(gate) * up of the joined (tokens, 2 * width), multiplied by each row's scale first and added to `bias`.

    `source` has the scales, (tokens,) of float32, is what they are to be made of, (tokens, size): see `row_scales`, or
    None where all of them are 1.
    """
    tokens, double = gate_up.shape
    if source is None:
        source = torch.ones(tokens, dtype=torch.float32, device=gate_up.device)
    width, is_scaled = double // 2, source.dim() == 1
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    size = 1 if is_scaled else source.shape[1]
    _silu_mul_kernel[(tokens, triton.cdiv(width, _GATED_PER_PROGRAM))](
        gate_up, source, gate_up if bias is None else bias, out, width, size, eps, PART=_GATED_PER_PROGRAM,
        BLOCK=triton.next_power_of_2(size), IS_SCALED=is_scaled, BIAS=bias is not None, num_warps=8,
    )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return min(16, max(4, block // 512))
