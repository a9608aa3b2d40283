"""A Triton kernel that lays the keys and values of sequences side by side, out of the blocks of their tables.

Imported on CUDA hosts only; TRITON_INTERPRET=1 runs it on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MOST_TOKENS = 64  # of a program


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["blocks", "places"])
def _gather_kernel(
    pool, blocks, places, keys, values, layer, NUM_LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    at, head = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(places + at).to(tl.int64), tl.load(places + at + 1).to(tl.int64)
    piece = ((tl.load(blocks + at).to(tl.int64) * KV_HEADS + head) * NUM_LAYERS + layer) * 2
    token, dims = (tl.program_id(2) * TOKENS + tl.arange(0, TOKENS))[:, None], tl.arange(0, DIM)[None, :]
    inside = first + token < stop  # and so inside the block
    source = pool + (piece * BLOCK + token) * DIM + dims
    target = ((first + token) * KV_HEADS + head) * DIM + dims
    tl.store(keys + target, tl.load(source, mask=inside), mask=inside)
    tl.store(values + target, tl.load(source + BLOCK * DIM, mask=inside), mask=inside)


def gather(
    pool: torch.Tensor, layer: int, blocks: torch.Tensor, places: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Copies a layer's keys and values of some blocks to where `places` says, (tokens, kv heads, head_dim) each.

    `blocks` (B,) and `places` (B + 1,) are int32: of a block, tokens up to the next one's place go to its own.
    """
    _, kv_heads, num_layers, _, block_size, dim = pool.shape
    tokens = min(_MOST_TOKENS, triton.next_power_of_2(block_size))
    _gather_kernel[(len(blocks), kv_heads, triton.cdiv(block_size, tokens))](
        pool, blocks, places, *into, layer, NUM_LAYERS=num_layers, KV_HEADS=kv_heads, BLOCK=block_size, DIM=dim,
        TOKENS=tokens, num_warps=4,
    )  # fmt: skip
