"""Part "rates": disaggregated beside aggregated GPUs under requests that arrive at random times."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from http_load import Plan, Request, run_plan
from load_figures import figures, joint_gaps, mean_decoding, percentile, poisson, random_prompt
from served import Served, Setting, serving

WARM_S = 3.0
SATURATED_SHARE = 0.1
"""A graph that serves no larger part of a rate well is not asked for more."""

UNDISTURBED_OUT = 400
"""Tokens beyond a shape's own with which sequences decode undisturbed: all prompts must be in before one ends."""

GRACE_S = 12.0
"""How long the requests of a window may take to end after it."""


class Shape(msgspec.Struct, frozen=True):
    """One kind of request and the arrival rates to try, in requests a second."""

    num_in: int
    num_out: int
    rates: list[float]

    @property
    def name(self) -> str:
        return f"{self.num_in}/{self.num_out}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """`4000/200:1,4,8`."""
        sizes, _, rates = text.partition(":")
        num_in, _, num_out = sizes.partition("/")
        return cls(int(num_in), int(num_out), [float(rate) for rate in rates.split(",")])


GRAPHS: dict[str, tuple[str, tuple[str, ...], dict[str, object]]] = {
    "agg": ("graph/agg.py", ("worker",), {"worker.replicas": 2}),
    "agg-2048": ("graph/agg.py", ("worker",), {"worker.replicas": 2, "worker.max_num_batched_tokens": 2_048}),
    "disagg": ("graph/disagg.py", ("prefill", "decode"), {}),
    "disagg-strict": ("graph/disagg.py", ("prefill", "decode"), {"decode.watch_prefill_queue": False}),
}
"""What is compared, two GPUs each: file, workers, settings. "strict" never prefills on the decode GPU; "2048" computes
prompts in smaller chunks, between which decodes wait less."""


def measure(
    setting: Setting, names: list[str], shapes: list[Shape], report: dict[str, Any], *, window_s: float, gpus: float
) -> None:
    """One row for each graph, shape and rate."""
    report |= {"window_s": window_s, "warm_s": WARM_S, "gpus_each": gpus, "rows": []}
    for name in names:
        file, nodes, sets = GRAPHS[name]
        if setting.is_over:
            report.setdefault("left_out", []).append(name)
            continue
        with serving(setting, file, {**setting.of(*nodes, gpus=gpus), **sets}) as graph:
            report[name] = {"ready_s": graph.ready_s, "replicas": graph.status()}
            _warm_up(setting, graph, shapes)
            for shape in shapes:
                for rate in shape.rates:
                    if setting.is_over:
                        report.setdefault("left_out", []).append(f"{name} {shape.name} at {rate:g}")
                        continue
                    row: dict[str, Any] = {"graph": name, "shape": shape.name, "rate": rate}
                    row |= _window(setting, graph, shape, rate, window_s)
                    if "decode" in nodes:
                        row |= _undisturbed(setting, graph, shape, max(1, round(row["decoding_mean"])))
                    report["rows"].append(row)
                    setting.save()
                    if row["goodput_per_s"] < SATURATED_SHARE * rate:
                        break


def _warm_up(setting: Setting, graph: Served, shapes: list[Shape]) -> None:
    """A few prompts of each shape on every worker, so that nothing is compiled or connected under load."""
    rng = random.Random(99)
    requests = [Request(random_prompt(rng, shape.num_in, setting.vocab_size), 16) for shape in shapes for _ in range(6)]
    answers = run_plan(Plan(port=graph.port, requests=requests, stop_s=60.0))
    failed = next((answer.error for answer in answers if not answer.is_complete), None)
    assert failed is None, failed
    graph.cores_used()


def _window(setting: Setting, graph: Served, shape: Shape, rate: float, window_s: float) -> dict[str, Any]:
    requests = poisson(
        rate, window_s, shape.num_in, shape.num_out, vocab_size=setting.vocab_size, seed=round(1_000 * rate)
    )
    answers = run_plan(Plan(port=graph.port, requests=requests, stop_s=window_s + GRACE_S))
    busy = {name: cores for name, cores in graph.cores_used().items() if cores > 0.05}
    decoding = mean_decoding(answers, warm_s=WARM_S, window_s=window_s)
    return figures(answers, warm_s=WARM_S, window_s=window_s) | {"cores_used": busy, "decoding_mean": decoding}


def _undisturbed(setting: Setting, graph: Served, shape: Shape, num_sequences: int) -> dict[str, Any]:
    """Times between tokens of so many sequences of the shape, all decoding, while nothing arrives and nothing ends."""
    rng = random.Random(num_sequences)
    prompts = [random_prompt(rng, shape.num_in, setting.vocab_size) for _ in range(num_sequences)]
    requests = [Request(prompt, shape.num_out + UNDISTURBED_OUT) for prompt in prompts]
    gaps = [gap * 1e3 for gap in joint_gaps(run_plan(Plan(port=graph.port, requests=requests, stop_s=60.0)))]
    return {f"undisturbed_itl_{name}_ms": percentile(gaps, share) for name, share in (("p50", 0.5), ("p99", 0.99))}


def line(report: dict[str, Any]) -> str:
    """What the terminal shows."""
    lines = ["graph          shape        rate   TTFT p50/p99 ms    ITL p50/p99 ms   tok/s  goodput  strict  complete"]
    for r in report["rows"]:
        pairs = [
            "/".join("-" if r[f"{kind}_{share}_ms"] is None else f"{r[f'{kind}_{share}_ms']:.1f}" for share in _SHARES)
            for kind in ("ttft", "itl")
        ]
        lines.append(
            f"{r['graph']:<14} {r['shape']:<10} {r['rate']:>6g} {pairs[0]:>17} {pairs[1]:>17} "
            f"{r['tokens_per_s']:>7,.0f} {r['goodput_per_s']:>8.2f} {r['strict_goodput_per_s']:>7.2f} "
            f"{r['complete']:>5}/{r['requests']} "
            f"{r['modes']} {r['errors'] or ''}" + _beside_undisturbed(r)
        )
    lines += [f"left out for want of time: {what}" for what in report.get("left_out", [])]
    return "\n".join(lines)


def _beside_undisturbed(row: dict[str, Any]) -> str:
    undisturbed_ms = row.get("undisturbed_itl_p99_ms")
    if not undisturbed_ms or not row["itl_p99_ms"]:
        return ""
    return f" ITL p99 {row['itl_p99_ms'] / undisturbed_ms:.2f} of undisturbed {undisturbed_ms:.1f} ms"


_SHARES = ("p50", "p99")
