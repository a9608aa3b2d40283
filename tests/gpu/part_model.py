"""Part "model": the default model's real weights, aggregated and disaggregated, beside transformers in float32.

One request after the other, then all at once. In float32 an answer may leave transformers' road at a near tie only;
in bfloat16 candidates that lie closer than `TIES` change places, and both graphs must still agree one by one.
"""

from __future__ import annotations

import json
from typing import Any

import part_equal
from http_load import Answer, Plan, Request, run_plan
from prompts import Prompt, counting, equality_prompts
from reference import Expected, greedy_reference
from served import Served, Setting, serving
from tokenizers import Tokenizer

LENGTHS = (1, 15, 16, 17, 33, 64, 65, 100, 129, 256, 257, 384, 513, 600, 1_000, 1_025, 1_500, 2_000)
COUNTS = (1, 5, 23)
NUM_OUT = 24
TIES = {"float32": 1e-3, "bfloat16": 0.5}
_LIMIT_S = 240.0


def measure(setting: Setting, pair: part_equal.Pair, chunk: int, dtypes: list[str], report: dict[str, Any]) -> None:
    """Each data type through both graphs."""
    tokenizer = Tokenizer.from_file(str(setting.model / "tokenizer.json"))
    prompts = equality_prompts(LENGTHS, num_shared=3, num_outputs=NUM_OUT)
    prompts += [
        Prompt(f"count{n}", tuple(tokenizer.encode(counting(n), add_special_tokens=False).ids), NUM_OUT) for n in COUNTS
    ]
    expected = greedy_reference(prompts, str(setting.model), device=setting.device)
    texts = {prompt.name: one.texts[-1] for prompt, one in zip(prompts, expected, strict=True)}
    report |= {"chunk": chunk, "gpus": pair.gpus, "counted": [texts[f"count{n}"] for n in COUNTS]}
    longest = json.loads((setting.model / "config.json").read_text())["max_position_embeddings"]
    for dtype in dtypes:
        if setting.is_over:
            break
        common: dict[str, Any] = {"load_format": "auto", "max_model_len": longest, "max_num_batched_tokens": chunk}
        common |= {"enable_prefix_caching": False, "dtype": dtype, "gpus": pair.gpus}
        found = report.setdefault(dtype, {})
        with serving(setting, "graph/agg.py", setting.of("worker", **common)) as graph:
            agg = _both(graph, prompts)
            found["agg"] = {way: judged(prompts, expected, agg[way], TIES[dtype]) for way in agg}
            setting.save()
        sets = setting.of("prefill", "decode", **common)
        sets |= {"prefill.tp": pair.prefill_tp, "decode.tp": pair.decode_tp, "decode.watch_prefill_queue": False}
        with serving(setting, "graph/disagg.py", sets | {"decode.max_local_prefill_length": 0}) as graph:
            disagg = _both(graph, prompts)
            found["disagg"] = {way: judged(prompts, expected, disagg[way], TIES[dtype]) for way in disagg}
            found["transport_errors"] = graph.metric("headrace_kv_transport_errors_total")
        found["agree"] = {
            way: sum(one.text == other.text for one, other in zip(agg[way], disagg[way], strict=True)) for way in agg
        }
        setting.save()


def _both(graph: Served, prompts: list[Prompt]) -> dict[str, list[Answer]]:
    requests = [Request(list(prompt.ids), prompt.num_outputs) for prompt in prompts]
    return {
        way: run_plan(Plan(port=graph.port, requests=requests, stop_s=_LIMIT_S, at_once=at_once, keeps_text=True))
        for way, at_once in (("one_by_one", 1), ("all_at_once", None))
    }


def judged(prompts: list[Prompt], expected: list[Expected], answers: list[Answer], tie: float) -> dict[str, Any]:
    """How many answers are transformers', how many leave them at a tie, and what is wrong with the others."""
    counts = {"answers": len(answers), "same": 0, "ties": 0, "remote": 0}
    wrong: list[dict[str, Any]] = []
    for prompt, right, answer in zip(prompts, expected, answers, strict=True):
        counts["remote"] += (answer.walk or {}).get("mode") == "remote"
        if answer.error:
            wrong.append({"prompt": prompt.name, "error": answer.error})
        elif answer.text == right.texts[-1]:
            counts["same"] += 1
        else:
            token = max(k for k, text in enumerate(right.texts) if answer.text.startswith(text))
            gap = right.gaps[min(token, len(right.gaps) - 1)]
            counts["ties"] += gap < tie
            if gap >= tie:
                row = {"prompt": prompt.name, "tokens": len(prompt.ids), "token": token, "gap": gap}
                wrong.append(row | {"expected": right.texts[-1], "found": answer.text})
    return counts | {"wrong": wrong}


def line(report: dict[str, Any]) -> str:
    """What the terminal shows."""
    lines = [f"counted: {text!r}" for text in report.get("counted", [])]
    for dtype, found in report.items():
        if dtype not in TIES:
            continue
        for graph in ("agg", "disagg"):
            for way, row in found.get(graph, {}).items():
                told = ", ".join(f"{name} {row[name]}" for name in ("answers", "same", "ties", "remote"))
                lines.append(f"{dtype} {graph} {way}: {told}, wrong {len(row['wrong'])}")
                lines += [f"  {wrong}" for wrong in row["wrong"]]
        lines.append(f"{dtype}: agg and disagg agree on {found.get('agree')}; "
                     f"transport errors {found.get('transport_errors')}")  # fmt: skip
    return "\n".join(lines)
