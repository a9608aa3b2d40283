"""HTTP throughput of the agg and disagg graphs on this machine, beside the bare engine in the same run.

    python tests/bench/bench_serve.py [--quick]

Rows: bare engine at 16, the agg graph over HTTP with 16 streams (goal: 90 % of the bare engine),
and the disagg graph with 8 streams and one core a worker.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]

import msgspec
import results
from bench_engine_cpu import bare_engine_tokens_per_s
from harness import ServedGraph, serving
from load import Load, Outcome, run_load


def idle_cpu_percent(graph: ServedGraph, seconds: float = 5.0) -> float:
    """Share of one core that all processes of an idle graph use."""
    processes = graph.family()
    before = sum(sum(p.cpu_times()[:2]) for p in processes)
    time.sleep(seconds)
    return (sum(sum(p.cpu_times()[:2]) for p in processes) - before) / seconds * 100


def serve_and_load(file: str, nodes: tuple[str, ...], load: Load) -> tuple[Outcome, float]:
    """The best of two runs after a warm-up, and the idle graph's CPU share in per cent."""
    with tempfile.TemporaryDirectory() as folder:
        sets = {f"{node}.dtype": "bfloat16" for node in nodes}
        with serving(file, log=Path(folder) / "serve.log", sets=sets) as graph:
            run_load(graph.url, Load(load.concurrency, load.concurrency, load.prompt_tokens, 8, seed=1))
            runs = [run_load(graph.url, Load(load.num_requests, load.concurrency, seed=seed)) for seed in (2, 3)]
            return max(runs, key=lambda run: run.tokens_per_s), idle_cpu_percent(graph)


def main() -> None:
    num = 16 if "--quick" in sys.argv else 48
    out = sys.stdout.write
    bare = bare_engine_tokens_per_s(num_requests=num, concurrency=16, dtype="bfloat16")
    out(f"{'bare engine, 16 at once':<44} {bare:8.1f} tok/s\n")
    agg, agg_idle = serve_and_load("graph/agg.py", ("worker",), Load(num, 16))
    out(f"{agg.row('agg over HTTP, 16 streams')}   {agg.tokens_per_s / bare:.2f} of the bare engine\n")
    out(f"{'idle agg graph':<44} {agg_idle:8.1f} % of a core\n")
    disagg, idle = serve_and_load("graph/disagg.py", ("prefill", "decode"), Load(num // 2, 8))
    out(f"{disagg.row('disagg over HTTP, 8 streams')}\n")
    out(f"{'idle disagg graph':<44} {idle:8.1f} % of a core\n")
    figures = {"bare_tok_s": bare, "agg": agg, "agg_idle": agg_idle, "disagg": disagg, "disagg_idle": idle}
    results.write("serve", msgspec.to_builtins(figures))


if __name__ == "__main__":
    main()
