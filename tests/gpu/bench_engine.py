"""The bare engine on one GPU, as a share of what the hardware could do at most; prints a table, writes JSON.

    python tests/gpu/bench_engine.py [--out FILE.json] [--rows decode,sampled,long,prefill] [--profile 1,256]

Random weights of Llama-3.1-8B's shape, prefix cache off, requests handed to the engine all at once; one
warm-up round of each row, then the median of the rest. The floor of a decode step is weights plus KV over
the read bandwidth measured in the same run, that of a prompt its multiplications over the matmul rate.
`vLLM` is the share of its floor that vLLM 0.20 reached on such a GPU (tokens per second, prompts included).
"""

from __future__ import annotations

import argparse
import json
import logging
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import LLAMA_8B

from components.engine.engine import Engine, EngineConfig
from components.engine.outputs import Ended, EngineRequest, StepReport, StepTokens
from components.engine.torch_runner import make_torch_runner
from components.messages import Sampling, Stopping
from components.options import WorkerOptions

WEIGHT_BYTES = 15.01e9
KV_BYTES = 131_072  # of one token
MATMUL_PARAMETERS = 6.98e9  # of the layers; the head runs on the last token alone
_PROFILED_STEPS = 20
GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=1)
# (name, sequences, tokens in, tokens out, sampling, vLLM's tokens per second or, for prompts, milliseconds)
ROWS = [
    *[("decode", n, 128, 256, GREEDY, peer) for n, peer in
      ((1, 204), (8, 1_557), (32, 5_484), (64, 9_466), (128, 14_626), (256, 18_264), (512, 20_022))],
    *[("sampled", n, 128, 256, DRAWN, None) for n in (1, 8, 32, 128, 256)],
    ("long", 32, 2_048, 128, GREEDY, 1_674), ("long", 128, 2_048, 128, GREEDY, 2_050),
    *[("prefill", 1, n, 1, GREEDY, peer) for n, peer in ((4_096, 100), (8_192, 216), (16_384, 483))],
    ("prefill", 16, 4_096, 1, GREEDY, 1_591),
]  # fmt: skip


class Bench:
    """One engine, and rounds of requests through it."""

    def __init__(self, folder: Path, batched_tokens: int) -> None:
        options = WorkerOptions(
            model=str(folder), load_format="dummy", device="cuda", max_num_seqs=512, max_model_len=20_480,
            max_num_batched_tokens=batched_tokens, enable_prefix_caching=False,
        )  # fmt: skip
        started_s = time.monotonic()
        runner = make_torch_runner(options, on_progress=lambda text: _note(text, started_s))
        self.start_s = time.monotonic() - started_s
        self.num_blocks = runner.num_blocks
        self._reports: queue.Queue[tuple[float, StepReport]] = queue.Queue()
        config = EngineConfig(
            hash_unit=16, max_num_seqs=512, max_num_batched_tokens=batched_tokens, max_waiting=1_000,
            enable_prefix_caching=False,
        )  # fmt: skip
        self.engine = Engine(runner, config, lambda report: self._reports.put((time.perf_counter(), report)))
        self.engine.start()
        self._random = np.random.default_rng(0)
        self._number = 0

    def round(self, count: int, tokens_in: int, tokens_out: int, sampling: Sampling) -> tuple[float, float, float]:
        """Seconds from the first request to the last token, of the median step once all decode, and until they do."""
        prompts = self._random.integers(1_000, 120_000, (count, tokens_in)).tolist()
        started_s = time.perf_counter()
        for prompt in prompts:
            self._number += 1
            self.engine.submit(
                EngineRequest(
                    id=str(self._number),
                    tokens=prompt,
                    num_prompt_tokens=tokens_in,
                    sampling=sampling,
                    stopping=Stopping(max_tokens=tokens_out),
                )
            )
        left, ends, seen_s = count, 0.0, []
        while left:
            at_s, report = self._reports.get(timeout=120)
            if report.stats and report.stats.num_sequences == report.stats.num_tokens == count:
                seen_s.append(at_s)
            for output in report.outputs:
                assert not isinstance(output, Ended), output.error
                if isinstance(output, StepTokens) and output.finish:
                    left, ends = left - 1, at_s
        steps = np.diff(seen_s)
        return ends - started_s, float(np.median(steps)) if len(steps) else 0.0, (seen_s or [ends])[0] - started_s


def measure_ceilings() -> dict[str, float]:
    """Read and copy in bytes per second, a bfloat16 product in operations per second."""
    big = torch.empty(2 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    other = torch.empty_like(big)
    a, b = (torch.randn(8_192, 8_192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    copy_s = _median_s(lambda: other.copy_(big))
    read_s = _median_s(lambda: torch.mv(big.view(-1, 16_384), other[:16_384]))
    product_s = _median_s(lambda: a @ b)
    copy, read = 2 * 2 * big.numel() / copy_s, 2 * big.numel() / read_s
    # A copy is reading and writing; where the product that only reads was slower, reading can do as much.
    return {"copy": copy, "read": max(read, copy), "matmul": 2 * 8_192**3 / product_s}


def _median_s(run: Any, repeats: int = 12) -> float:
    times = []
    for _ in range(repeats + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times[3:])


def floor_s(row: tuple[Any, ...], ceilings: dict[str, float]) -> float:
    """The least time of a row's decode step, or of its prompts."""
    name, count, tokens_in, tokens_out = row[:4]
    if name == "prefill":
        attention = 2 * 2 * 32 * 4_096 * tokens_in**2 / 2
        return float(count * (2 * MATMUL_PARAMETERS * tokens_in + attention) / ceilings["matmul"])
    context = tokens_in + tokens_out / 2
    return float((WEIGHT_BYTES + KV_BYTES * context * count) / ceilings["read"])


def run_row(bench: Bench, row: tuple[Any, ...], ceilings: dict[str, float], rounds: int) -> dict[str, Any]:
    """Measures one row."""
    name, count, tokens_in, tokens_out, sampling, peer = row
    times = [bench.round(count, tokens_in, tokens_out, sampling) for _ in range(rounds + 1)][1:]
    total_s, step_s, prompts_s = (statistics.median(values) for values in zip(*times, strict=True))
    least_s = floor_s(row, ceilings)
    took_s = total_s if name == "prefill" else step_s
    rate = count * (tokens_in if name == "prefill" else tokens_out) / total_s
    ratio = None if peer is None else (peer / 1e3 / total_s if name == "prefill" else rate / peer)
    return {
        "row": name, "sequences": count, "in": tokens_in, "out": tokens_out, "tokens_per_s": rate, "ms": took_s * 1e3,
        "prompts_ms": prompts_s * 1e3, "floor_ms": least_s * 1e3, "share": least_s / took_s if took_s else None,
        "of_vllm": ratio,
    }  # fmt: skip


def show(rows: list[dict[str, Any]], ceilings: dict[str, float]) -> str:
    """The table."""
    lines = [
        f"copy {ceilings['copy'] / 1e12:.2f} TB/s, read {ceilings['read'] / 1e12:.2f} TB/s, "
        f"matmul {ceilings['matmul'] / 1e12:.0f} TFLOP/s",
        "row         seqs     in   out     tok/s       ms  floor ms  share  x vLLM",
    ]
    for r in rows:
        ratio = "" if r["of_vllm"] is None else f"{r['of_vllm']:.2f}"
        lines.append(
            f"{r['row']:<10} {r['sequences']:>5} {r['in']:>6} {r['out']:>5} {r['tokens_per_s']:>9,.0f} {r['ms']:>8.2f} "
            f"{r['floor_ms']:>9.2f} {r['share'] or 0:>6.2f} {ratio:>7}"
        )
    return "\n".join(lines)


def profile(bench: Bench, count: int) -> str:
    """Where the time of a decode step goes, kernel by kernel: of the first steps without a prompt."""
    kernels = _kernels_of(bench, count, 128, 2 * _PROFILED_STEPS)
    prompts = [i for i, event in enumerate(kernels) if "PrefillWithKVCache" in event.name]
    ends = [i for i, event in enumerate(kernels) if "_argmax_join" in event.name]  # each step's last kernel
    steps = [i for i in ends if i > prompts[-1]][: _PROFILED_STEPS + 1]
    took_us = kernels[steps[-1]].time_range.end - kernels[steps[0]].time_range.end
    return f"decode of {count}, a step: " + _told(kernels[steps[0] + 1 : steps[-1] + 1], took_us, len(steps) - 1)


def profile_prompts(bench: Bench, count: int, tokens: int) -> str:
    """Where the time of prompts goes, kernel by kernel."""
    bench.round(count, tokens, 1, GREEDY)
    kernels = _kernels_of(bench, count, tokens, 1)
    took_us = kernels[-1].time_range.end - kernels[0].time_range.start
    return f"{count} prompts of {tokens}: " + _told(kernels, took_us, 1)


def _kernels_of(bench: Bench, count: int, tokens_in: int, tokens_out: int) -> list[Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        bench.round(count, tokens_in, tokens_out, GREEDY)
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(kernels, key=lambda event: event.time_range.start)


def _told(kernels: list[Any], took_us: float, rounds: int) -> str:
    spent: dict[str, list[float]] = {}
    for event in kernels:
        spent.setdefault(event.name, []).append(event.time_range.end - event.time_range.start)
    busy_us = sum(map(sum, spent.values()))
    lines = [f"{took_us / rounds:,.0f} us, {1 - busy_us / took_us:.1%} between kernels"]
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:16]:
        each, number = statistics.mean(times), len(times) / rounds
        lines.append(f"{sum(times) / took_us:7.1%} {number:7.1f} x {each:8.1f} us  {name[:100]}")
    return "\n".join(lines)


def _note(text: str, started_s: float) -> None:
    logging.info("%6.1f s  %s", time.monotonic() - started_s, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", default="decode,sampled,long,prefill")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batched-tokens", type=int, default=8_192)
    parser.add_argument("--profile", default="", help="decode steps of so many sequences, kernel by kernel")
    parser.add_argument("--profile-prompts", default="", help="the same of prompts: 1x4096,8x4096")
    parser.add_argument("--max-seconds", type=float, default=1e9, help="start no further row after this time")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    started_s = time.monotonic()
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(LLAMA_8B))
        bench = Bench(Path(folder), args.batched_tokens)
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        if row[0] in args.rows.split(",") and time.monotonic() - started_s < args.max_seconds:
            rows.append(run_row(bench, row, ceilings, args.rounds))
            logging.info(rows[-1])
    profiles = [profile(bench, int(count)) for count in args.profile.split(",") if count]
    prompts = [each.split("x") for each in args.profile_prompts.split(",") if each]
    profiles += [profile_prompts(bench, int(count), int(tokens)) for count, tokens in prompts]
    bench.engine.stop()
    text = show(rows, ceilings)
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__, "commit": found.stdout.strip(), "start_s": bench.start_s,
        "num_blocks": bench.num_blocks, "ceilings": ceilings, "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
        args.out.with_suffix(".txt").write_text("\n\n".join([text, *profiles]) + "\n")
    sys.stdout.write("\n\n".join([*profiles, f"ready after {bench.start_s:.1f} s", text]) + "\n")


if __name__ == "__main__":
    main()
