"""Curves of `bench_disagg.py rates`: TTFT, ITL and goodput over the arrival rate, one PNG for each kind of request.

    python tests/gpu/plot_rates.py RESULT.json [MORE.json ...] [--out FOLDER]

Needs matplotlib, which nothing else here does. Rows of all files are put together. The rate is that at which
requests really came: in a short window it differs from the one asked for.
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
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

PANELS = (
    ("ttft_{}_ms", "time to first token, ms", TTFT_LIMIT_S * 1e3),
    ("itl_{}_ms", "time between tokens, ms", ITL_LIMIT_S * 1e3),
)
NAMES = {
    "agg": "2 aggregated workers",
    "agg-2048": "2 aggregated workers, chunks of 2,048",
    "disagg": "prefill + decode, some prefilled on decode",
    "disagg-strict": "prefill + decode",
}
KINDS = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "goodput_per_s", "strict_goodput_per_s")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of one result, each with the rate at which its counted requests came."""
    found = json.loads(path.read_text())["rates"]
    seconds = found["window_s"] - found["warm_s"]
    return [{**row, "offered": row["requests"] / seconds} for row in found["rows"]]


def draw(shape: str, rows: list[dict[str, Any]], path: Path) -> None:
    """One figure: p99 drawn through and p50 dashed; goodput by each answer's mean gap, dashed by 99 % of its gaps."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    colors = {}
    for number, graph in enumerate(dict.fromkeys(row["graph"] for row in rows)):
        colors[graph] = f"C{number}"
        own = sorted((row for row in rows if row["graph"] == graph), key=lambda row: row["offered"])
        rates = [row["offered"] for row in own]
        curves = {kind: [row[kind] for row in own] for kind in KINDS}
        for axis, (field, _, _) in zip(axes, PANELS, strict=False):
            axis.plot(rates, curves[field.format("p99")], "o-", color=colors[graph])
            axis.plot(rates, curves[field.format("p50")], "o--", color=colors[graph], alpha=0.6, markersize=4)
        axes[2].plot(rates, curves["goodput_per_s"], "o-", color=colors[graph])
        axes[2].plot(rates, curves["strict_goodput_per_s"], "o--", color=colors[graph], alpha=0.6, markersize=4)
    for axis, (_, label, limit) in zip(axes, PANELS, strict=False):
        axis.axhline(limit, color="grey", linestyle=":")
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        _name(axis, label, through="p99", dashed="p50", dotted=f"limit, {limit:.0f} ms")
    highest = max(row["offered"] for row in rows)
    axes[2].plot([0, highest], [0, highest], color="grey", linestyle=":")
    _name(axes[2], "requests a second within both limits", through="mean gap", dashed="99 % of gaps", dotted="all")
    tokens_in, _, tokens_out = (f"{int(part):,}" if part.isdigit() else part for part in shape.partition("/"))
    figure.suptitle(f"{tokens_in} tokens in, {tokens_out} out, two GPUs each")
    graphs = [Line2D([], [], color=color, marker="o", label=NAMES.get(graph, graph)) for graph, color in colors.items()]
    figure.legend(handles=graphs, loc="outside lower center", ncols=len(graphs), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _name(axis: Axes, label: str, **styles: str) -> None:
    lines = {"through": "-", "dashed": "--", "dotted": ":"}
    handles = [Line2D([], [], color="grey", linestyle=lines[style], label=text) for style, text in styles.items()]
    axis.legend(handles=handles, fontsize=8)
    axis.set_xlim(left=0)
    axis.set_xlabel("requests a second")
    axis.set_title(label, fontsize=10)
    axis.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    rows = [row for path in args.results for row in rows_of(path)]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of_shape = [row for row in rows if row["shape"] == shape]
        draw(shape, of_shape, args.out / f"rates-{shape.replace('/', '-')}.png")


if __name__ == "__main__":
    main()
