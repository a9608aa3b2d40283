"""Requests for the routing tests: completions of token ids, some at once, each with the walk it took."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec


class Ask(msgspec.Struct, frozen=True):
    """One prompt: token ids, or the messages of a chat."""

    ids: tuple[int, ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    max_tokens: int = 8

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.messages else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        prompt = {"messages": list(self.messages)} if self.messages else {"prompt": list(self.ids)}
        fields = {"max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True, "headrace": {"timing": True}}
        return {**prompt, **fields}


class Told(msgspec.Struct, frozen=True):
    """One answer."""

    status: int
    text: str
    worker: str
    prefill: str | None
    predicted_tokens: int
    cached_tokens: int


def make_ids(seed: int, num_tokens: int) -> tuple[int, ...]:
    """Token ids that share no prefix with those of another seed."""
    rng = random.Random(seed)
    return tuple(rng.randrange(1_000, 40_000) for _ in range(num_tokens))


async def ask(client: httpx.AsyncClient, request: Ask) -> Told:
    """One request; anything but 200 is an answer too."""
    reply = await client.post(request.path, json=request.body)
    if reply.status_code != 200:
        return Told(reply.status_code, reply.text, "", None, 0, 0)
    told = reply.json()
    choice, walk = told["choices"][0], told["headrace"]
    text = choice["message"]["content"] if request.messages else choice["text"]
    return Told(200, text, walk["worker"], walk["prefill_worker"], walk["predicted_tokens"], walk["cached_tokens"])


def ask_all(url: str, requests: Sequence[Ask], *, at_once: int) -> list[Told]:
    """All answers in order, `at_once` in flight."""

    async def run() -> list[Told]:
        slots = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:

            async def one(request: Ask) -> Told:
                async with slots:
                    return await ask(client, request)

            return list(await asyncio.gather(*(one(request) for request in requests)))

    return asyncio.run(run())
