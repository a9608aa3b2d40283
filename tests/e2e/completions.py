"""Sends prompts to a served graph and collects what comes back, one by one or many at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
from prompts import Prompt


class Answer(msgspec.Struct, frozen=True):
    """One finished completion."""

    text: str
    finish: str | None
    usage: dict[str, Any]
    headrace: dict[str, Any] | None


async def _one(client: httpx.AsyncClient, prompt: Prompt, stream: bool, fields: dict[str, Any]) -> Answer:
    body = {
        "model": "smollm2-135m-instruct",
        "prompt": list(prompt.ids),
        "max_tokens": prompt.num_outputs,
        "temperature": 0,
        "ignore_eos": True,
        "headrace": {"timing": True},
        **fields,
    }
    if not stream:
        reply = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        choice = reply["choices"][0]
        return Answer(choice["text"], choice["finish_reason"], reply["usage"], reply.get("headrace"))
    text, finish, usage, headrace, done = "", None, {}, None, False
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            assert not done, "something came after [DONE]"
            if line == "data: [DONE]":
                done = True
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                assert finish is None or not choice["text"], "text after the finish reason"
                text += choice["text"]
                finish = choice["finish_reason"] or finish
            usage, headrace = event.get("usage") or usage, event.get("headrace") or headrace
    assert done, "the stream ended without [DONE]"
    return Answer(text, finish, usage, headrace)


def complete(
    url: str, prompts: Sequence[Prompt], *, at_once: int = 1, stream: bool = True, **fields: Any
) -> dict[str, Answer]:
    """All prompts' answers by name, `at_once` of them in flight."""

    async def run() -> dict[str, Answer]:
        slots = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:

            async def one(prompt: Prompt) -> Answer:
                async with slots:
                    return await _one(client, prompt, stream, fields)

            answers = await asyncio.gather(*(one(p) for p in prompts))
        return dict(zip((p.name for p in prompts), answers, strict=True))

    return asyncio.run(run())
