"""Part "routing": KV-aware placement beside round robin, two workers whose pools do not hold all documents."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from http_load import Plan, Request, run_plan
from load_figures import percentile, random_prompt
from served import Setting, serving

BLOCK = 16
POLICIES = ("kv", "round_robin")
_LIMIT_S = 240.0


class Workload(msgspec.Struct, frozen=True):
    """Questions about documents, shuffled; `held` documents fit into one worker's pool."""

    document_tokens: int
    num_documents: int = 8
    num_questions: int = 20
    question_tokens: int = 64
    num_out: int = 64
    at_once: int = 8
    held: int = 5

    @property
    def num_blocks(self) -> int:
        """Room for the documents, and for what the running requests need beside them."""
        own = -(-(self.question_tokens + self.num_out) // BLOCK) + 1
        return self.held * -(-self.document_tokens // BLOCK) + own * (self.at_once + 2)

    def requests(self, vocab_size: int) -> list[Request]:
        """The same for every policy."""
        rng = random.Random(7)
        documents = [random_prompt(rng, self.document_tokens, vocab_size) for _ in range(self.num_documents)]
        prompts = [
            document + random_prompt(rng, self.question_tokens, vocab_size)
            for document in documents
            for _ in range(self.num_questions)
        ]
        rng.shuffle(prompts)
        return [Request(prompt, self.num_out) for prompt in prompts]


def measure(setting: Setting, workloads: list[Workload], gpus: float, report: dict[str, Any]) -> None:
    """One row for each policy and workload, all of them beginning with empty caches."""
    report["rows"] = []
    for workload in workloads:
        for policy in POLICIES:
            if not setting.is_over:
                report["rows"].append({"policy": policy, **_row(setting, policy, workload, gpus)})
                setting.save()


def _row(setting: Setting, policy: str, workload: Workload, gpus: float) -> dict[str, Any]:
    sets = setting.of("worker", gpus=gpus, replicas=2, num_blocks=workload.num_blocks)
    with serving(setting, "graph/agg.py", {**sets, "router.policy": policy}) as graph:
        rng = random.Random(99)
        warm = [Request(random_prompt(rng, workload.document_tokens, setting.vocab_size), 8) for _ in range(4)]
        run_plan(Plan(port=graph.port, requests=warm, stop_s=60.0))
        requests = workload.requests(setting.vocab_size)
        answers = run_plan(Plan(port=graph.port, requests=requests, stop_s=_LIMIT_S, at_once=workload.at_once))
    complete = [answer for answer in answers if answer.is_complete]
    ttft = [answer.ttft_s * 1e3 for answer in complete]
    seconds = max((answer.ended_s or 0.0 for answer in complete), default=0.0)
    return {
        "document_tokens": workload.document_tokens,
        "num_blocks": workload.num_blocks,
        "at_once": workload.at_once,
        "requests": len(answers),
        "complete": len(complete),
        "hit_rate": sum(a.cached_tokens for a in complete) / max(1, sum(a.num_prompt for a in complete)),
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p90_ms": percentile(ttft, 0.9),
        "ttft_p99_ms": percentile(ttft, 0.99),
        "seconds": seconds,
        "tokens_per_s": sum(answer.num_tokens for answer in complete) / max(1e-9, seconds),
    }


def line(report: dict[str, Any]) -> str:
    """What the terminal shows."""
    return "\n".join(
        f"{r['policy']:<12} documents of {r['document_tokens']}: hits {r['hit_rate']:.1%}, TTFT p50 "
        f"{r['ttft_p50_ms']:.0f} p90 {r['ttft_p90_ms']:.0f} p99 {r['ttft_p99_ms']:.0f} ms, "
        f"{r['tokens_per_s']:,.0f} tok/s, {r['complete']}/{r['requests']} in {r['seconds']:.1f} s"
        for r in report["rows"]
    )
