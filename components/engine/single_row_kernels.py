"""A Triton kernel for products of one row, which a lone sequence's decode steps are made of.

A program keeps a few of the weight's rows to the end of the sum, so that the norm in front and what follows, the
gated activation or the residual's sum, happen in the product itself. Sums are float32. Imported on CUDA hosts only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LONG = 8_192  # from so many inputs on, more outputs a program and fewer inputs at a time are quicker (H200)


@triton.jit
def _single_row_kernel(
    x, weight, bias, out, eps, size: tl.constexpr, width: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < width
    at = tl.arange(0, INPUTS)
    rows = weight + tl.minimum(outputs, width - 1).to(tl.int64)[:, None] * size + at[None, :]
    products = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    others = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    squares = tl.zeros([INPUTS], tl.float32)
    for start in range(0, size, INPUTS):
        inside = start + at < size
        part = tl.load(rows + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        given = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            other = tl.load(rows + width * size + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            others += other.to(tl.float32) * given[None, :]
        products += part.to(tl.float32) * given[None, :]
        if NORM:
            squares += given * given
    sums = tl.sum(products, axis=1)
    scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / size + eps) if NORM else 1.0
    sums *= scale
    if BIAS:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(others, axis=1) * scale
        if BIAS:
            up += tl.load(bias + width + outputs, mask=is_output, other=0.0).to(tl.float32)
        sums = sums / (1.0 + tl.exp(-sums)) * up
    if ADD:
        sums += tl.load(out + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + outputs, sums.to(out.dtype.element_ty), mask=is_output)


def single_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    eps: float | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """x, (1, size), times `weight`, (outputs, size), plus `bias`: (1, outputs), or added to `add_to` in place.

    With `eps`, x is divided by its root mean square. With `gated`, the first half of the outputs are a gate's, and
    silu(gate) * other is returned, (1, outputs / 2).
    """
    size, width = x.shape[1], weight.shape[0] // (2 if gated else 1)
    out = add_to if add_to is not None else torch.empty((1, width), dtype=x.dtype, device=x.device)
    if size >= _LONG:
        outputs, inputs, warps = (8 if gated else 16), 1_024, 8
    else:
        outputs, inputs, warps = (2, 4_096, 4) if gated else (4, 4_096, 8)
    _single_row_kernel[(triton.cdiv(width, outputs),)](
        x, weight, x if bias is None else bias, out, eps or 0.0, size, width, OUTPUTS=outputs,
        INPUTS=min(inputs, triton.next_power_of_2(size)), NORM=eps is not None, BIAS=bias is not None, GATED=gated,
        ADD=add_to is not None, num_warps=warps,
    )  # fmt: skip
    return out
