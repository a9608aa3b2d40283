"""Curves of `bench_disagg.py rates`: TTFT, ITL and goodput over the arrival rate, one PNG for each kind of request.

    python tests/gpu/plot_rates.py RESULT.json [MORE.json ...] [--out FOLDER]

Needs matplotlib, which nothing else here does. Rows of all files are put together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from load_figures import ITL_LIMIT_S, TTFT_LIMIT_S

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

PANELS = (
    ("ttft_{}_ms", "time to first token, ms", TTFT_LIMIT_S * 1e3),
    ("itl_{}_ms", "time between tokens, ms", ITL_LIMIT_S * 1e3),
)


def draw(shape: str, rows: list[dict[str, Any]], path: Path) -> None:
    """One figure: p50 dashed, p99 drawn through, the limit dotted; goodput beside the arrival rate."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for number, graph in enumerate(dict.fromkeys(row["graph"] for row in rows)):
        own = sorted((row for row in rows if row["graph"] == graph), key=lambda row: row["rate"])
        rates, color = [row["rate"] for row in own], f"C{number}"
        for axis, (field, _, _) in zip(axes, PANELS, strict=False):
            axis.plot(rates, [row[field.format("p50")] for row in own], "o--", color=color, alpha=0.5)
            axis.plot(rates, [row[field.format("p99")] for row in own], "o-", color=color, label=graph)
        axes[2].plot(rates, [row["goodput_per_s"] for row in own], "o-", color=color, label=graph)
    for axis, (_, label, limit) in zip(axes, PANELS, strict=False):
        axis.axhline(limit, color="grey", linestyle=":")
        axis.set_yscale("log")
        _name(axis, f"{label} (p50 dashed, p99)")
    highest = max(row["rate"] for row in rows)
    axes[2].plot([0, highest], [0, highest], color="grey", linestyle=":")
    _name(axes[2], "goodput, requests a second")
    tokens_in, _, tokens_out = shape.partition("/")
    figure.suptitle(f"{tokens_in} tokens in, {tokens_out} out; two GPUs each")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _name(axis: Axes, label: str) -> None:
    axis.set_xlabel("arrivals a second")
    axis.set_title(label, fontsize=10)
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    rows = [row for path in args.results for row in json.loads(path.read_text())["rates"]["rows"]]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of_shape = [row for row in rows if row["shape"] == shape]
        draw(shape, of_shape, args.out / f"rates-{shape.replace('/', '-')}.png")


if __name__ == "__main__":
    main()
