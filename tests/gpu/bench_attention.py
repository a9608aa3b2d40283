"""What a layer's attention takes on the GPU: decodes of like and of unlike lengths, prompts from blocks and gathered.

    python tests/gpu/bench_attention.py     prints one JSON object

8 KV heads of 128, 4 queries each, bfloat16. `floor_us` is reading keys and values at the rate of a copy for decodes;
prompts are given in TFLOP/s too. Microseconds in CUDA graphs (decodes), launched one behind the other (prompts).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from components.engine.attention import KVPool, Shape
from components.engine.batch import cumulated
from components.engine.decode_attention import DecodeAttention, DecodeTables
from components.engine.flash import FlashAttention, FlashStep, SideBySide, Tables
from components.engine.products import gpu_seconds
from components.messages import KVLayout

QUERY_HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 32, 8, 128, 16, 2
NUM_BLOCKS = 22_000
SHAPE = Shape(DIM**-0.5)
DECODES = {
    **{f"{count} x {length:,}": [length] * count for count, length in
       ((1, 200), (1, 16_000), (8, 200), (64, 200), (256, 200), (512, 200), (64, 2_100), (128, 2_100))},
    "63 x 200, 1 x 16,000": [200] * 63 + [16_000],
    "255 x 200, 1 x 16,000": [200] * 255 + [16_000],
    "56 x 200, 8 x 8,000": [200] * 56 + [8_000] * 8,
}  # fmt: skip
PROMPTS = {  # tokens before, and new ones
    "2,048": [(0, 2_048)], "4,096": [(0, 4_096)], "8,192": [(0, 8_192)], "2 x 4,096": [(0, 4_096)] * 2,
    "8,192 behind 8,192": [(8_192, 8_192)], "8 x 512": [(0, 512)] * 8, "1,024 behind 16,000": [(16_000, 1_024)],
}  # fmt: skip


def main() -> None:
    layout = KVLayout("", "bfloat16", BLOCK, LAYERS, KV_HEADS, DIM, 0, KV_HEADS)
    pool = KVPool(layout, NUM_BLOCKS, torch.device("cuda"))
    pool.blocks.normal_()
    rate = _copy_rate(pool.blocks)
    found = {
        "gpu": torch.cuda.get_device_name(),
        "copy_tb_per_s": round(rate / 1e12, 2),
        "decodes": {name: _decodes(pool, lengths, rate) for name, lengths in DECODES.items()},
        "prompts": {name: _prompts(pool, parts) for name, parts in PROMPTS.items()},
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


def _copy_rate(source: torch.Tensor) -> float:
    """Bytes read and written per second."""
    target = torch.empty_like(source)
    return 2 * source.nbytes / gpu_seconds(lambda: target.copy_(source))


def _decodes(pool: KVPool, lengths: list[int], rate: float) -> dict[str, float]:
    attention = DecodeAttention(pool.blocks, QUERY_HEADS, 512)
    blocks, cu_blocks = _tables(lengths)
    positions = _ints(np.array(lengths) - 1)
    queries = torch.randn(len(lengths), QUERY_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(queries)
    step = DecodeTables(positions, positions, _ints(cu_blocks), blocks)

    def run() -> None:
        for layer in range(LAYERS):
            attention.attend_written(layer, queries, SHAPE, step, out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    floor_s = sum(lengths) * 2 * KV_HEADS * DIM * 2 / rate
    return {"us": _us(graph.replay), "floor_us": round(floor_s * 1e6, 1)}


def _prompts(pool: KVPool, parts: list[tuple[int, int]]) -> dict[str, float]:
    attention = FlashAttention(pool, QUERY_HEADS, DecodeAttention(pool.blocks, QUERY_HEADS, 8))
    lengths = np.array([start + count for start, count in parts], np.int32)
    cu_seqlens = cumulated(np.array([count for _, count in parts], np.int32))
    blocks, cu_blocks = _tables(lengths.tolist())
    sizes = np.full(cu_blocks[-1], BLOCK, np.int32)
    places = cumulated(sizes)  # all lengths are multiples of a block's
    assert (lengths % BLOCK == 0).all()
    queries = torch.randn(int(cu_seqlens[-1]), QUERY_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out, nothing = torch.empty_like(queries), torch.zeros(0, dtype=torch.int32, device="cuda")
    found = {}
    gathered = SideBySide(_ints(places), torch.from_numpy(places[cu_blocks]))
    for name, side_by_side in (("blocks", None), ("gathered", gathered)):
        ends = torch.full((len(parts),), BLOCK, dtype=torch.int32)
        tables = Tables(torch.from_numpy(cu_seqlens), torch.from_numpy(cu_blocks), ends, blocks, side_by_side)
        decodes = DecodeTables(nothing, nothing, nothing, nothing)
        step = FlashStep(attention, _ints(np.zeros(len(queries))), decodes, tables)

        def run(step: FlashStep = step) -> None:
            for layer in range(LAYERS):
                step.attend(layer, queries, SHAPE, out)

        found[f"{name}_us"] = _us(run)
    operations = sum(4 * QUERY_HEADS * DIM * (start * count + count * count / 2) for start, count in parts)
    rates = {f"{name}_tflops": round(operations / found[f"{name}_us"] / 1e6) for name in ("blocks", "gathered")}
    return {**found, **rates}


def _tables(lengths: list[int]) -> tuple[torch.Tensor, np.ndarray]:
    """Blocks anywhere in the pool, and where each sequence's begin."""
    cu_blocks = cumulated(-(-np.array(lengths, np.int32) // BLOCK))
    return torch.randperm(NUM_BLOCKS, device="cuda")[: int(cu_blocks[-1])].int(), cu_blocks


def _ints(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32)).cuda()


def _us(run: Callable[[], object]) -> float:
    return round(gpu_seconds(run) * 1e6 / LAYERS, 1)


if __name__ == "__main__":
    main()
