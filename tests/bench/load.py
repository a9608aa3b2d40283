"""A streaming load against one served graph: throughput, time to first token, time between tokens."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time

import httpx
import msgspec


class Load(msgspec.Struct, frozen=True):
    """What is sent: `num_requests` prompts of random token ids, `concurrency` in flight."""

    num_requests: int
    concurrency: int
    prompt_tokens: int = 128
    output_tokens: int = 128
    seed: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """What came of it. Times in ms."""

    tokens_per_s: float
    ttft_ms: float
    ttft_p99_ms: float
    itl_ms: float
    itl_p99_ms: float
    seconds: float

    def row(self, name: str) -> str:
        return (
            f"{name:<44} {self.tokens_per_s:8.1f} tok/s   TTFT {self.ttft_ms:7.0f} / {self.ttft_p99_ms:7.0f} ms   "
            f"ITL {self.itl_ms:6.1f} / {self.itl_p99_ms:6.1f} ms"
        )


def random_prompts(load: Load, vocab_size: int = 49_000) -> list[list[int]]:
    """Prompts that share nothing."""
    rng = random.Random(load.seed)
    return [[rng.randrange(300, vocab_size) for _ in range(load.prompt_tokens)] for _ in range(load.num_requests)]


async def _stream(client: httpx.AsyncClient, model: str, prompt: list[int], num: int) -> list[float]:
    """Arrival times of one request's tokens, the time of sending first."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": num, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    times = [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith('data: {"error"'):
                raise RuntimeError(line)
            if line.startswith("data: {") and '"choices":[]' not in line:
                times.append(time.perf_counter())
    return times


async def _run(url: str, model: str, load: Load) -> Outcome:
    slots = asyncio.Semaphore(load.concurrency)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as client:

        async def one(prompt: list[int]) -> list[float]:
            async with slots:
                return await _stream(client, model, prompt, load.output_tokens)

        began = time.perf_counter()
        streams = await asyncio.gather(*(one(p) for p in random_prompts(load)))
        seconds = time.perf_counter() - began
    first = sorted((s[1] - s[0]) * 1e3 for s in streams)
    gaps = sorted((b - a) * 1e3 for s in streams for a, b in itertools.pairwise(s[1:])) or [0.0]
    return Outcome(
        tokens_per_s=load.num_requests * load.output_tokens / seconds,
        ttft_ms=statistics.median(first),
        ttft_p99_ms=first[int(len(first) * 0.99)],
        itl_ms=statistics.median(gaps),
        itl_p99_ms=gaps[int(len(gaps) * 0.99)],
        seconds=seconds,
    )


def run_load(url: str, load: Load, model: str = "smollm2-135m-instruct") -> Outcome:
    """Sends the load and waits for all of it."""
    return asyncio.run(_run(url, model, load))
