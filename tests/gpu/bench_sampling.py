"""What choosing tokens costs on the GPU, greedy and drawn, beside a step's other work.

python tests/gpu/bench_sampling.py [--rows 1,8,32,128,256] [--vocab 128256] [--kernels]     prints one JSON object

Logits are normal with deviation 2: at 0.95 their nucleus has thousands of tokens, more than a trained model's.
`gpu_us` is the kernels' time with launches queued ahead, `host_us` what a call takes on the launching thread. With
`--kernels` each kernel of a draw with top_p is timed for itself, for such logits and for flatter ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import triton

from components.engine import sampling_kernels
from components.engine.draw_settings import COLUMNS, DrawSettings
from components.engine.gpu_sampling import GpuSampler
from components.engine.row_floor import make_row_floor
from components.engine.runner import SampleRow
from components.engine.sampling_kernels import argmax
from components.messages import Sampling

KINDS = {
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
}
_ROUNDS = 20
_AHEAD_CYCLES = 20_000_000  # about 10 ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,32,128,256")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    counts = [int(rows) for rows in given.rows.split(",")]
    if given.kernels:
        figures = [_kernels(rows, given.vocab, deviation) for rows in counts for deviation in (2.0, 1.28)]
    else:
        figures = [_measure(rows, given.vocab) for rows in counts]
    result = {"device": torch.cuda.get_device_name(), "vocab": given.vocab, "figures": figures}
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


def _measure(num_rows: int, vocab: int) -> dict[str, object]:
    logits = torch.randn(num_rows, vocab, device="cuda").mul_(2).bfloat16()
    tokens = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
    sampler = GpuSampler(num_rows, vocab, logits.device)
    figures: dict[str, object] = {"rows": num_rows, "greedy": _times(lambda: argmax(logits, tokens))}
    for name, kind in KINDS.items():
        empty = np.empty(0, np.int32)
        rows = [SampleRow(i, Sampling(**kind, seed=i), 100, empty, empty) for i in range(num_rows)]

        def step(rows: list[SampleRow] = rows) -> None:
            argmax(logits, tokens)
            sampler.draw(logits, rows, tokens)

        figures[f"greedy, then {name}"] = _times(step)
    return figures


def _kernels(num_rows: int, vocab: int, deviation: float) -> dict[str, object]:
    """Microseconds of each kernel of a draw, in a CUDA graph of its own."""
    logits = torch.randn(num_rows, vocab, device="cuda").mul_(deviation).bfloat16()
    tokens, empty = logits.argmax(-1), np.empty(0, np.int32)
    rows = [SampleRow(i, Sampling(temperature=0.8, top_p=0.95, seed=i), 100, empty, empty) for i in range(num_rows)]
    settings = torch.from_numpy(DrawSettings([row.sampling for row in rows], vocab).at(rows)).cuda().view(-1, COLUMNS)
    space = sampling_kernels.DrawSpace.make(num_rows, vocab, logits.device)
    row_floor = make_row_floor(logits.device)
    assert row_floor is not None, "the floors of this GPU are those of wide_floor.py"
    part = space.part
    parts = triton.cdiv(vocab, part)
    given, scored = (logits, logits.stride(0), settings, tokens), (space.floors, space.scores, space.buckets)
    sizes = {"PARTS": parts, "PADDED": triton.next_power_of_2(parts)}

    def floor() -> None:
        row_floor.find(logits, settings, tokens, space.floors)

    def score() -> None:
        kernel = sampling_kernels._score_kernel
        kernel[(num_rows, parts)](*given, *scored, vocab, PART=part, IS_WIDE=False, num_warps=4)

    def join() -> None:
        sampling_kernels._join_kernel[(num_rows,)](*given, *scored, vocab, **sizes, IS_WIDE=False, num_warps=2)

    calls = (floor, score, join)
    return {"rows": num_rows, "deviation": deviation, **{call.__name__: _graph_us(call) for call in calls}}


def _graph_us(call: Callable[[], None]) -> float:
    """The median time of a call's kernels, captured."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(_ROUNDS):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    return round(statistics.median(times), 1)


def _times(call: Callable[[], None]) -> dict[str, float]:
    """Medians of the GPU's and the launching thread's time for a call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    host_us = []
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_ROUNDS)]
    torch.cuda._sleep(_AHEAD_CYCLES)
    for before, after in events:
        before.record()
        began_s = time.perf_counter()
        call()
        host_us.append((time.perf_counter() - began_s) * 1e6)
        after.record()
    torch.cuda.synchronize()
    gpu_us = statistics.median(before.elapsed_time(after) * 1e3 for before, after in events)
    return {"gpu_us": round(gpu_us, 1), "host_us": round(statistics.median(host_us), 1)}


if __name__ == "__main__":
    main()
