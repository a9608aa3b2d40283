"""Policies beside each other on real processes: questions about a few documents, aggregated workers with small pools.

    python tests/bench/bench_routing.py [--quick] [--questions 20] [--at-once 4]

8 documents of 1,500 tokens, 4 workers whose pools hold three of them each, questions in random order; every
policy starts with empty caches. The best possible hit rate is that of an oracle: each document computed once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]

from harness import serving
from prompts import text_ids

BLOCK = 16
POLICIES = ("kv", "round_robin", "least_busy")


class Workload(msgspec.Struct, frozen=True):
    """Questions about documents."""

    num_documents: int = 8
    document_tokens: int = 1_500
    num_questions: int = 20
    question_tokens: int = 20
    max_tokens: int = 8
    num_workers: int = 4
    at_once: int = 4

    @property
    def blocks_per_worker(self) -> int:
        """Three documents, and what the running requests need beside them."""
        own = -(-(self.question_tokens + self.max_tokens) // BLOCK) + 1
        return 3 * -(-self.document_tokens // BLOCK) + own * (self.at_once + 2)

    @property
    def oracle(self) -> float:
        """The hit rate if every document is computed once."""
        cached = self.document_tokens // BLOCK * BLOCK
        return cached * (self.num_questions - 1) / ((self.document_tokens + self.question_tokens) * self.num_questions)

    def prompts(self) -> list[list[int]]:
        """All of them, shuffled the same way for every policy."""
        rng, words = random.Random(7), text_ids()
        documents = [
            [
                *rng.sample(words, 16),
                *(words * 2)[(start := rng.randrange(len(words))) : start + self.document_tokens - 16],
            ]
            for _ in range(self.num_documents)
        ]
        prompts = [
            document + rng.sample(words, self.question_tokens)
            for document in documents
            for _ in range(self.num_questions)
        ]
        rng.shuffle(prompts)
        return prompts


class Answer(msgspec.Struct, frozen=True):
    """What one request took."""

    ttft_s: float
    cached_tokens: int
    prompt_tokens: int


async def answer(client: httpx.AsyncClient, ids: Sequence[int], max_tokens: int) -> Answer:
    """One streamed completion."""
    body = {
        "prompt": list(ids), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    began_s, ttft_s, usage = time.perf_counter(), 0.0, None
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                ttft_s = ttft_s or time.perf_counter() - began_s
                usage = json.loads(line[6:]).get("usage") or usage
    assert usage is not None
    return Answer(ttft_s, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])


async def answer_all(url: str, workload: Workload) -> list[Answer]:
    """The whole workload, so many at once."""
    slots = asyncio.Semaphore(workload.at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

        async def one(ids: Sequence[int]) -> Answer:
            async with slots:
                return await answer(client, ids, workload.max_tokens)

        return list(await asyncio.gather(*(one(ids) for ids in workload.prompts())))


def run(policy: str, workload: Workload) -> str:
    """One line of the table."""
    sets = {
        "worker.replicas": workload.num_workers,
        "worker.num_blocks": workload.blocks_per_worker,
        "worker.max_model_len": 2_048,
        "router.policy": policy,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("graph/agg.py", log=Path(folder) / "serve.log", sets=sets) as graph,
    ):
        began_s = time.perf_counter()
        answers = asyncio.run(answer_all(graph.url, workload))
        elapsed_s = time.perf_counter() - began_s
        predicted = graph.metric("headrace_overlap_predicted_tokens_total")
        actual = graph.metric("headrace_overlap_actual_tokens_total")
    ttft = sorted(answer.ttft_s for answer in answers)
    hit_rate = sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers)
    return (
        f"| {policy} | {hit_rate:.1%} | {sum(ttft) / len(ttft):.2f} s | {ttft[int(0.9 * len(ttft))]:.2f} s "
        f"| {elapsed_s:.0f} s | {predicted:,.0f} / {actual:,.0f} |\n"
    )


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few short questions")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=4)
    args = parser.parse_args()
    workload = Workload(num_questions=args.questions, at_once=args.at_once)
    if args.quick:
        workload = Workload(num_questions=4, document_tokens=400, at_once=args.at_once)
    out = sys.stdout
    out.write(
        f"{workload.num_documents} documents of {workload.document_tokens} tokens, {workload.num_questions} questions "
        f"each, {workload.num_workers} workers of {workload.blocks_per_worker} blocks, {workload.at_once} at once; "
        f"an oracle's hit rate: {workload.oracle:.1%}\n\n"
        "| policy | hit rate | TTFT mean | TTFT p90 | all done | tokens predicted / cached |\n"
        "|---|---|---|---|---|---|\n"
    )
    for policy in POLICIES:
        out.write(run(policy, workload))
        out.flush()


if __name__ == "__main__":
    main()
