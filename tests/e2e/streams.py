"""Many streams at once against a served graph, each checked to the last event, and what became of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import msgspec

LOGPROB_TOLERANCE = 1e-3


class Outcome(msgspec.Struct):
    """What came of one stream."""

    number: int
    texts: dict[int, str] = {}  # by choice
    finishes: dict[int, str] = {}
    logprobs: dict[int, list[float]] = {}
    usage: dict[str, Any] = {}
    ids: set[str] = set()  # of its chunks; one, if all is well
    created: set[int] = set()
    error: str = ""
    status: int = 0
    local_port: int = 0
    longest_pause_s: float = 0.0
    num_events: int = 0
    is_done: bool = False

    def same_as(self, other: Outcome) -> bool:
        """Whether a client would see the same answer; logprobs may differ as sums in another order do."""
        ours, theirs = (
            (o.texts, o.finishes, o.usage.get("completion_tokens"), o.usage.get("prompt_tokens")) for o in (self, other)
        )
        return ours == theirs and self._has_logprobs_of(other)

    def _has_logprobs_of(self, other: Outcome) -> bool:
        if {i: len(values) for i, values in self.logprobs.items()} != {i: len(v) for i, v in other.logprobs.items()}:
            return False
        pairs = [zip(values, other.logprobs[i], strict=True) for i, values in self.logprobs.items()]
        return all(abs(a - b) < LOGPROB_TOLERANCE for pair in pairs for a, b in pair)

    @property
    def fault(self) -> str:
        """What is wrong with the stream by itself; empty if nothing is."""
        if self.error:
            return self.error
        if not self.is_done:
            return "the stream ended without [DONE]"
        if len(self.ids) != 1 or len(self.created) != 1:
            return f"ids {self.ids} and times {self.created} in one stream"
        return ""


async def stream(client: httpx.AsyncClient, number: int, body: dict[str, Any]) -> Outcome:
    """One streamed completion; faults are told in the outcome, not raised."""
    outcome = Outcome(number, {}, {}, {}, {}, set(), set())
    body = {"stream": True, "stream_options": {"include_usage": True}, **body}

    async def trace(event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            outcome.local_port = info["return_value"].get_extra_info("client_addr")[1]

    try:
        async with client.stream("POST", "/v1/completions", json=body, extensions={"trace": trace}) as reply:
            outcome.status = reply.status_code
            if reply.status_code != 200:
                outcome.error = f"{reply.status_code} {(await reply.aread()).decode()}"
                return outcome
            last = time.monotonic()
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                outcome.longest_pause_s, last = max(outcome.longest_pause_s, now - last), now
                _take(outcome, line.removeprefix("data: "))
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


def _take(outcome: Outcome, data: str) -> None:
    if outcome.is_done:
        outcome.error = "something came after [DONE]"
    if data == "[DONE]":
        outcome.is_done = True
        return
    event = json.loads(data)
    outcome.num_events += 1
    if "error" in event:
        outcome.error = str(event["error"])
        return
    outcome.ids.add(event["id"])
    outcome.created.add(event["created"])
    outcome.usage = event.get("usage") or outcome.usage
    for choice in event["choices"]:
        index = choice["index"]
        if index in outcome.finishes:
            outcome.error = f"choice {index} went on after its finish"
        outcome.texts[index] = outcome.texts.get(index, "") + choice["text"]
        if choice["logprobs"]:
            outcome.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
        if choice["finish_reason"]:
            outcome.finishes[index] = choice["finish_reason"]


def bodies(num: int, *, max_tokens: int, prompt_tokens: int = 40) -> list[dict[str, Any]]:
    """`num` different requests: greedy, seeded, with two choices, with logprobs, in turn."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 7},
        {"temperature": 0.8, "seed": 8, "n": 2},
        {"temperature": 0, "logprobs": 2},
    ]
    return [
        {
            "prompt": [1000 + (number * 131 + i * 17) % 40_000 for i in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **kinds[number % len(kinds)],
        }
        for number in range(num)
    ]


async def run_streams(
    url: str, requests: Sequence[dict[str, Any]], meanwhile: Callable[[], Awaitable[None]] | None = None
) -> list[Outcome]:
    """All requests at once, each on a connection of its own; `meanwhile` runs beside them."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as client:
        streams = [asyncio.create_task(stream(client, number, body)) for number, body in enumerate(requests)]
        if meanwhile is not None:
            await meanwhile()
        return await asyncio.gather(*streams)


def faults(outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> list[str]:
    """What is wrong with the outcomes, in words: ended badly, or another answer than expected."""
    found = []
    for outcome, right in zip(outcomes, expected, strict=True):
        fault = outcome.fault or ("" if outcome.same_as(right) else "another answer than undisturbed")
        found += [f"stream {outcome.number}: {fault}"] if fault else []
    return found


class Tally(msgspec.Struct):
    """What an endless load has brought: how many ended well, and the faults."""

    num_good: int = 0
    faults: list[str] = []
    longest_pause_s: float = 0.0


async def keep_busy(
    url: str,
    requests: Sequence[dict[str, Any]],
    expected: Sequence[Outcome],
    until: asyncio.Event,
    *,
    at_once: int,
    keep_alive: bool = True,
) -> Tally:
    """Sends the requests over and over, `at_once` in flight, until `until` is set; each answer is compared."""
    tally = Tally(0, [])
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None if keep_alive else 0)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as client:

        async def one(start: int) -> None:
            number = start
            while not until.is_set():
                index = number % len(requests)
                outcome = await stream(client, index, requests[index])
                wrong = faults([outcome], [expected[index]])
                tally.faults += wrong
                tally.num_good += not wrong
                tally.longest_pause_s = max(tally.longest_pause_s, outcome.longest_pause_s)
                number += at_once

        await asyncio.gather(*(one(start) for start in range(at_once)))
    return tally
