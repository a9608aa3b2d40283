"""Part "served": what HTTP, processor and router cost beside the bare engine of the same run."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from http_load import Answer, Plan, Request, run_plan
from load_figures import burst_tokens_per_s, gaps_of, percentile, random_prompt
from served import Served, Setting, serving

NUM_IN, NUM_OUT = 128, 256
SINGLES = 20
_BURST_LIMIT_S = 90.0
_BARE_LIMIT_S = 400.0


def measure(setting: Setting, streams: list[int], report: dict[str, Any]) -> None:
    """The bare engine in a process of its own, then the agg graph over HTTP, with the same options."""
    options: dict[str, Any] = {"load_format": "dummy", "device": setting.device, "model": str(setting.model)}
    options["max_model_len"] = setting.max_len
    options |= {name.partition(".")[2]: _value(v) for name, v in setting.sets.items() if name.startswith("worker.")}
    bare = _bare(options, streams)
    report["bare"] = bare
    setting.save()
    with serving(setting, "graph/agg.py", setting.of("worker")) as graph:
        report |= {"ready_s": graph.ready_s, "replicas": graph.status(), "streams": {}}
        parts_ms = _single_parts_ms(setting, graph)
        ttft_ms = parts_ms["whole"]
        report |= {"ttft_ms": ttft_ms, "ttft_overhead_ms": ttft_ms - bare["ttft_ms"], "ttft_parts_ms": parts_ms}
        setting.save()
        for count in streams:
            if not setting.is_over:
                report["streams"][str(count)] = _streams(setting, graph, count, bare["tokens_per_s"][str(count)])
                setting.save()


def _value(text: str) -> Any:
    """An option's value as the command line would read it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _bare(options: dict[str, Any], streams: list[int]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("bare.py")), "--options", json.dumps(options)]
    command += ["--streams", ",".join(map(str, streams)), "--tokens-in", str(NUM_IN), "--tokens-out", str(NUM_OUT)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_BARE_LIMIT_S)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _single_parts_ms(setting: Setting, graph: Served) -> dict[str, float]:
    """Medians of one request after the other: the time to the first token and what it is made of."""
    _send(setting, graph, 1, 8, at_once=1, seed=1)
    parts = [_parts_ms(answer) for answer in _send(setting, graph, SINGLES, 8, at_once=1, seed=2)]
    return {name: statistics.median(part[name] for part in parts) for name in parts[0]}


def _parts_ms(answer: Answer) -> dict[str, float]:
    """One answer's time to the first token by its walk; `worker` is from request to token on its event loop."""
    assert answer.walk is not None
    walk, whole = answer.walk["ms"], answer.ttft_s * 1e3
    processor = walk["time_to_first_token"]  # from the end of tokenizing
    return {
        "whole": whole,
        "client_and_ingress": whole - walk["tokenize"] - processor,
        "tokenize": walk["tokenize"],
        "place": walk["place"],
        "to_worker_and_back": processor - walk["place"] - walk["worker_first_token"],
        "worker": walk["worker_first_token"],
    }


def _streams(setting: Setting, graph: Served, count: int, bare: list[float]) -> dict[str, Any]:
    """Two bursts after a short one; the best of each side counts."""
    _send(setting, graph, count, 8, at_once=None, seed=count)
    graph.cores_used()
    rates, gaps = [], []
    for seed in (1, 2):
        answers = _send(setting, graph, count, NUM_OUT, at_once=None, seed=1_000 * count + seed)
        rates.append(burst_tokens_per_s(answers))
        gaps += [gap * 1e3 for answer in answers for gap in gaps_of(answer)]
    busy = {name: cores for name, cores in graph.cores_used().items() if cores > 0.02}
    return {
        "tokens_per_s": rates,
        "share_of_bare": max(rates) / max(bare),
        "ttft_p50_ms": percentile([answer.ttft_s * 1e3 for answer in answers], 0.5),
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
        "cores_used": busy,
    }


def _send(setting: Setting, graph: Served, count: int, num_out: int, *, at_once: int | None, seed: int) -> list[Answer]:
    rng = random.Random(seed)
    requests = [Request(random_prompt(rng, NUM_IN, setting.vocab_size), num_out) for _ in range(count)]
    answers = run_plan(Plan(port=graph.port, requests=requests, stop_s=_BURST_LIMIT_S, at_once=at_once))
    failed = next((answer.error for answer in answers if not answer.is_complete), None)
    assert failed is None, failed
    return answers


def line(report: dict[str, Any]) -> str:
    """What the terminal shows."""
    lines = [
        f"ready after {report['ready_s']:.1f} s; one stream: TTFT {report['ttft_ms']:.1f} ms, "
        f"bare engine {report['bare']['ttft_ms']:.1f} ms, rested {report['bare']['rested_ttft_ms']:.1f} ms",
        f"its parts in ms: {', '.join(f'{name} {ms:.2f}' for name, ms in report['ttft_parts_ms'].items())}",
    ]
    for count, found in report["streams"].items():
        lines.append(
            f"{count} streams: {max(found['tokens_per_s']):,.0f} tok/s, {found['share_of_bare']:.1%} of the bare "
            f"engine; ITL p50 {found['itl_p50_ms']:.1f} ms; cores {found['cores_used']}"
        )
    return "\n".join(lines)
