"""Part "equal": disaggregated answers beside aggregated ones, token by token, and what each hand-over took.

First one request after the other: both sides then run the same batches, so that even bfloat16 must agree to the
last token. Then all at once, where batches differ and near-ties may flip: where the first difference stands, and
how far apart the two best candidates were there, is told for each. Each graph's answers all at once are compared
with its own one by one as well, which tells whose batches made the difference.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

import msgspec
from http_load import Answer, Plan, Request, run_plan
from load_figures import random_prompt
from served import Served, Setting, serving

LENGTHS = (20, 33, 64, 100, 129, 256, 500, 513, 1_000, 1_024, 2_000, 2_500, 4_000, 4_096, 6_000, 8_192)
NUM_OUT = 24
NEAR_TIE = 1e-3
_LIMIT_S = 240.0


class Pair(msgspec.Struct, frozen=True):
    """How prefill and decode are laid out: ranks of each, and each one's share of its GPUs."""

    prefill_tp: int
    decode_tp: int
    gpus: float


def measure(setting: Setting, pair: Pair, chunk: int, report: dict[str, Any]) -> None:
    """The agg graph's answers, then the disagg graph's."""
    lengths = [length for length in LENGTHS if length + NUM_OUT < setting.max_len]
    report |= {"pair": msgspec.to_builtins(pair), "lengths": lengths, "chunk": chunk}
    common = {"max_num_batched_tokens": chunk, "enable_prefix_caching": False}
    with serving(setting, "graph/agg.py", setting.of("worker", **common)) as graph:
        report["agg"] = {"ready_s": graph.ready_s, "replicas": graph.status()}
        expected = _both(setting, graph, lengths)
        setting.save()
    sets = setting.of("prefill", "decode", gpus=pair.gpus, **common)
    sets |= {"prefill.tp": pair.prefill_tp, "decode.tp": pair.decode_tp, "decode.watch_prefill_queue": False}
    with serving(setting, "graph/disagg.py", sets) as graph:
        report["disagg"] = {"ready_s": graph.ready_s, "replicas": graph.status()}
        found = _both(setting, graph, lengths)
        for name in expected:
            report[name] = compared(expected[name], found[name])
        for name, own in (("agg_batches", expected), ("disagg_batches", found)):
            report[name] = compared(own["one_by_one"], own["all_at_once"])
        report["hand_overs"] = [hand_over(answer) for answer in found["one_by_one"] if _mode(answer) == "remote"]
        report["transport_errors"] = graph.metric("headrace_kv_transport_errors_total")
        report["link_gb_s"] = graph.metric("headrace_kv_link_bytes_per_second") / 1e9
        setting.save()


def _both(setting: Setting, graph: Served, lengths: list[int]) -> dict[str, list[Answer]]:
    rng = random.Random(5)
    prompts = [random_prompt(rng, length, setting.vocab_size) for length in lengths]
    requests = [Request(prompt, NUM_OUT) for prompt in prompts]
    plan = {"port": graph.port, "requests": requests, "stop_s": _LIMIT_S, "logprobs": 2, "keeps_text": True}
    run_plan(msgspec.convert(plan | {"requests": requests[-1:]}, Plan))  # compiles, connects
    return {
        "one_by_one": run_plan(msgspec.convert(plan | {"at_once": 1}, Plan)),
        "all_at_once": run_plan(msgspec.convert(plan, Plan)),
    }


def compared(expected: list[Answer], found: list[Answer]) -> dict[str, Any]:
    """How many answers are the same, and where the others part."""
    rows: list[dict[str, Any]] = []
    for one, other in zip(expected, found, strict=True):
        if one.error or other.error:
            rows.append({"prompt": one.num_prompt, "error": one.error or other.error})
        elif one.text != other.text:
            at = first_difference(one.text, other.text)
            gap = one.gaps[at] if at < len(one.gaps) else None
            row: dict[str, Any] = {"prompt": one.num_prompt, "token": at, "gap": gap, "mode": _mode(other)}
            rows.append(row | {"expected": _words(one, at), "found": _words(other, at)})
    differing = [row for row in rows if "error" not in row]
    return {
        "answers": len(expected),
        "words": sum(len(answer.text.split()) for answer in expected),
        "failed": len(rows) - len(differing),
        "same": len(expected) - len(rows),
        "near_ties": sum(row["gap"] is not None and row["gap"] < NEAR_TIE for row in differing),
        "differences": rows,
    }


def first_difference(one: str, other: str) -> int:
    """The index of the first word, which is a token, in which two texts differ."""
    words = [text.split(" ") for text in (one.lstrip(" "), other.lstrip(" "))]
    shorter = min(map(len, words))
    return next((i for i in range(shorter) if words[0][i] != words[1][i]), shorter)


def _words(answer: Answer, at: int) -> list[str]:
    """The word before a place, and the next few."""
    return answer.text.lstrip(" ").split(" ")[max(0, at - 1) : at + 3]


def _mode(answer: Answer) -> str | None:
    return (answer.walk or {}).get("mode")


def hand_over(answer: Answer) -> dict[str, Any]:
    """One remote prefill in ms: its walk's steps, and from the end of prefill until decode could go on."""
    walk = answer.walk or {}
    ms, timeline = walk["ms"], walk["timeline"]
    marks = {name: [at for mark, at in timeline if mark == name] for name in ("chunk", "read", "read_done", "adopted")}
    found = {
        "prompt": answer.num_prompt,
        "ttft": answer.ttft_s * 1e3,
        "prefill": ms["worker_prefill"],
        "post": ms["worker_transfer_post"],
        "wire": ms["worker_transfer_wire"],
        "blocks": walk["blocks_moved"],
        "descriptors": walk["descriptors"],
        "mib": walk["bytes_moved"] / (1 << 20),
        "gb_s": walk["bytes_moved"] / max(1e-6, ms["worker_transfer_post"] + ms["worker_transfer_wire"]) / 1e6,
        "chunks": len(marks["chunk"]),
    }
    if all(marks.values()):
        found["last_read"] = marks["read_done"][-1] - marks["read"][-1]
        found["prefill_to_decode"] = marks["adopted"][-1] - marks["chunk"][-1]
    return found


def line(report: dict[str, Any]) -> str:
    """What the terminal shows."""
    lines = []
    for name in ("one_by_one", "all_at_once", "agg_batches", "disagg_batches"):
        found = report.get(name, {})
        lines.append(
            f"{name}: {found.get('same')} of {found.get('answers')} answers ({found.get('words')} words) the same"
        )
        lines += [f"  {difference}" for difference in found.get("differences", [])]
    rows = report.get("hand_overs", [])
    lines += [" ".join(f"{name} {value:.1f}" for name, value in row.items()) for row in rows]
    late = [row["prefill_to_decode"] - row["last_read"] for row in rows if "last_read" in row]
    if late:
        lines.append(f"end of prefill to decode, beyond the last READ: median {statistics.median(late):.1f} ms")
    return "\n".join(lines)
