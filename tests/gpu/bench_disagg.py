"""Graphs served over HTTP on GPUs: what serving costs, whether disaggregation answers the same, what it buys.

    python tests/gpu/bench_disagg.py PART [--shape llama-8b] [--device cuda] [--out FILE.json] [--seconds 400]

    served    one GPU    the agg graph with 64 and 256 streams beside the bare engine; TTFT of one; time to ready
    equal     one or two the disagg graph's tokens beside the agg graph's; hand-over times; `--pair 2,1` for ranks
    rates     two        prefill + decode beside two aggregated workers at rising arrival rates: TTFT, ITL, goodput
    routing   two        KV-aware placement beside round robin over shared prefixes
    model     one or two the default model's real weights through both graphs beside transformers

Random weights (`load_format=dummy`) of a shape in `models.py`, but for `model`; `--set NODE.OPTION=V` is handed on.
Results are written after each step. `--device cpu --shape tiny` tries everything without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import part_equal
import part_model
import part_rates
import part_routing
import part_served
from models import SHAPES, write_model
from served import Setting

from components.model_cache import resolve_model
from components.options import DEFAULT_MODEL

PARTS = {
    "served": part_served, "equal": part_equal, "rates": part_rates, "routing": part_routing, "model": part_model,
}  # fmt: skip


def run_part(setting: Setting, args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Runs the part that was asked for, filling `report`."""
    if args.part == "served":
        part_served.measure(setting, [int(count) for count in args.streams.split(",")], report)
    elif args.part == "equal":
        part_equal.measure(setting, _pair(args), args.chunk, report)
    elif args.part == "model":
        part_model.measure(setting, _pair(args), args.chunk, args.dtypes.split(","), report)
    elif args.part == "rates":
        shapes = [part_rates.Shape.parse(text) for text in args.rates.split(";")]
        names = args.graphs.split(",")
        part_rates.measure(setting, names, shapes, report, window_s=args.window, gpus=args.gpus)
    else:
        workloads = [part_routing.Workload(int(tokens)) for tokens in args.documents.split(",")]
        part_routing.measure(setting, workloads, args.gpus, report)


def _pair(args: argparse.Namespace) -> part_equal.Pair:
    prefill_tp, decode_tp = map(int, args.pair.split(","))
    return part_equal.Pair(prefill_tp, decode_tp, args.gpus)


def about(args: argparse.Namespace) -> dict[str, Any]:
    """What was run, where and when."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    gpus = subprocess.run(
        ["sh", "-c", "nvidia-smi --query-gpu=name --format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return {
        "command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d %H:%M"), "commit": commit.stdout.strip(),
        "gpus": gpus.stdout.split("\n")[:-1], "cores": len(os.sched_getaffinity(0)), "shape": args.shape,
    }  # fmt: skip


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0, help="begin no further step after this time")
    parser.add_argument("--patience", type=float, default=240.0, help="longest start of a graph")
    parser.add_argument("--processors", type=int, default=4)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="NODE.OPTION=V")
    parser.add_argument("--gpus", type=float, default=1.0, help="of each worker; 0.5 lets two share one")
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--pair", default="1,1", help="ranks of prefill and decode")
    parser.add_argument("--max-len", type=int, default=32_768, help="longest sequence")
    parser.add_argument("--chunk", type=int, default=2_048, help="tokens of a step in `equal` and `model`")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what `model` serves: another place of its folder")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of `model`")
    parser.add_argument("--graphs", default="agg,disagg")
    parser.add_argument("--rates", default="4000/200:1,4,7,10,13;1000/500:4,12,20,28")
    parser.add_argument("--window", type=float, default=20.0, help="seconds in which requests arrive")
    parser.add_argument("--documents", default="1500,4000", help="their tokens")
    return parser.parse_args()


def _end(number: int, _: object) -> None:
    raise TimeoutError(f"told to end by {signal.Signals(number).name}")


def main() -> int:
    """Prints the part's table; the JSON holds all."""
    args = parse()
    report: dict[str, Any] = {"about": about(args), args.part: {}}
    found = report[args.part]

    def save() -> None:
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        is_real = args.part == "model"
        setting = Setting(
            device=args.device,
            model=resolve_model(args.model) if is_real else write_model(Path(folder) / args.shape, args.shape),
            vocab_size=SHAPES[args.shape]["vocab_size"],
            max_len=args.max_len,
            processors=args.processors,
            sets=dict(text.split("=", 1) for text in args.sets),
            patience_s=args.patience,
            stop_s=time.monotonic() + args.seconds,
            save=save,
        )
        failure = None
        signal.signal(signal.SIGTERM, _end)  # so that the graph ends as well, and the figures so far are written
        try:
            run_part(setting, args, found)
        except Exception:  # whatever it was, the figures so far are worth having
            failure = report["failure"] = traceback.format_exc()
    save()
    if failure:
        sys.stdout.write(failure[-6_000:] + "\n")
    sys.stdout.write((json.dumps(found)[:2_000] if failure else PARTS[args.part].line(found)) + "\n")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
