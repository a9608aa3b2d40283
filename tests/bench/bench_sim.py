"""Compares policies in the simulator: `python tests/bench/bench_sim.py [--trace FILE | --kind KIND] ...`.

Capacity is what the fleet finishes per second with the policy `kv` when all requests are there at once; the
loads are fractions of it, the trace stretched to fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from simulated_worker import Speed
from simulation import Fate, Simulation, bound
from traces import GENERATORS, Request, read_trace, stretched

from components.router import RouterOptions

POLICIES = ("round_robin", "least_busy", "kv")
COLUMNS = "| trace | load | policy | hit rate | TTFT p50 / p99 s | end to end p50 / p99 s | shed | most on one worker |"


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def hit_rate(fates: Sequence[Fate]) -> float:
    """The part of the prompt tokens that nobody computed."""
    done = [fate for fate in fates if fate.e2e_s is not None]
    return sum(fate.cached_tokens for fate in done) / max(1, sum(fate.request.input_length for fate in done))


def capacity(trace: Sequence[Request], *, num_workers: int, speed: Speed) -> float:
    """Requests per second when all are there at once."""
    options = RouterOptions(policy="kv", max_worker_requests=64, max_waiting=len(trace), max_wait_s=1e9)
    simulation = Simulation(options, num_workers=num_workers, speed=speed)
    fates = simulation.run(stretched(trace, 1e-9))
    return len(trace) / max(fate.e2e_s for fate in fates if fate.e2e_s is not None)


def row(name: str, load: str, policy: str, fates: Sequence[Fate]) -> str:
    """One line of the table."""
    done = [fate for fate in fates if fate.e2e_s is not None]
    ttft = [fate.ttft_s for fate in done if fate.ttft_s is not None]
    e2e = [fate.e2e_s for fate in done if fate.e2e_s is not None]
    placed = [fate.worker for fate in done if fate.worker]
    most = max((placed.count(worker) for worker in set(placed)), default=0) / max(1, len(placed))
    return (
        f"| {name} | {load} | {policy} | {hit_rate(fates):.1%} "
        f"| {percentile(ttft, 0.5):.2f} / {percentile(ttft, 0.99):.2f} "
        f"| {percentile(e2e, 0.5):.1f} / {percentile(e2e, 0.99):.1f} | {1 - len(done) / len(fates):.1%} "
        f"| {f'{most:.0%}' if placed else ''} |"
    )


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format")
    parser.add_argument("--kind", choices=[*GENERATORS, "all"], default="all", help="or a generated one")
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=1_000, help="of 512 tokens, in each worker's pool")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 0.95])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    speed = Speed(num_blocks=args.blocks)
    kinds = list(GENERATORS) if args.kind == "all" else [args.kind]
    traces = (
        {args.trace.stem: read_trace(args.trace)[: args.requests]}
        if args.trace
        else {kind: GENERATORS[kind](args.requests, seed=args.seed) for kind in kinds}
    )
    out = sys.stdout
    out.write(COLUMNS + "\n" + "|---" * COLUMNS.count(" | ") + "|---|\n")
    for name, trace in traces.items():
        rate = capacity(trace, num_workers=args.workers, speed=speed)
        span_s = trace[-1].timestamp / 1e3
        out.write(row(name, f"{rate:.1f}/s", "bound", bound(trace, speed)) + "\n")
        for load in args.loads:
            factor = len(trace) / (rate * load) / span_s
            for policy in POLICIES:
                simulation = Simulation(RouterOptions(policy=policy), num_workers=args.workers, speed=speed)
                fates = simulation.run(stretched(trace, factor))
                out.write(row(name, f"{load:.0%}", policy, fates) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
