"""A streaming load over HTTP, in a process of its own: requests leave when they are due, whatever came back.

    due         its body is encoded; it waits for its time, or for one of `at_once` places
    sent        on a connection that is kept alive, or on a new one
    streaming   each event with text is a time; nothing is parsed
    ended       complete, failed, or cut off when the plan's time was up

`run_plan` is what benchmarks call: the plan goes to a child's standard input, the answers come back.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import uvloop

_EVENT = b'"finish_reason":null'
_END = b"\r\n0\r\n\r\n"
_PARTS_KEPT = 6  # the last ones hold the end of the text, the usage and the walk
_RUN_MARGIN_S = 60.0


class Request(msgspec.Struct, frozen=True):
    """One prompt of token ids; `due_s` counts from the plan's start."""

    prompt: list[int]
    max_tokens: int
    due_s: float = 0.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent, and what is kept of the replies. After `stop_s` what still runs is cut off."""

    port: int
    requests: list[Request]
    stop_s: float
    at_once: int | None = None  # None: each leaves when it is due
    logprobs: int | None = None
    keeps_text: bool = False


class Answer(msgspec.Struct):
    """One request's life, in seconds from the plan's start. `error` None and `ended_s` set: it is complete."""

    due_s: float
    num_prompt: int
    sent_s: float = 0.0
    times_s: list[float] = msgspec.field(default_factory=list)
    ended_s: float | None = None
    error: str | None = None
    num_tokens: int = 0
    cached_tokens: int = 0
    walk: dict[str, Any] | None = None
    text: str = ""
    gaps: list[float] = msgspec.field(default_factory=list)  # between the two best log-probabilities of each token

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.ended_s is not None

    @property
    def ttft_s(self) -> float:
        """From when it was due, so that a generator or a server that is behind does not look fast."""
        return self.times_s[0] - self.due_s


def run_plan(plan: Plan) -> list[Answer]:
    """Carries out a plan in a child process and returns all answers, in the plan's order."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=msgspec.msgpack.encode(plan),
        stdout=subprocess.PIPE,
        timeout=plan.stop_s + _RUN_MARGIN_S,
        check=True,
    )
    return msgspec.msgpack.decode(done.stdout, type=list[Answer])


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; `answer` is the request it carries."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_usable = False
        self._answer: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has another base
        self.is_usable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_usable = False
        if self._answer is not None:
            self._fail(f"the connection was lost: {exc}")

    async def carry(self, body: bytes, answer: Answer, began_s: float, *, keeps_all: bool) -> bytes:
        """Sends one request; returns what is kept of the reply once it has ended."""
        assert self.transport is not None
        self._answer, self._began_s, self._tail = answer, began_s, b""
        self._parts: deque[bytes] = deque(maxlen=None if keeps_all else _PARTS_KEPT)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.sent_s = time.perf_counter() - began_s
        self.transport.write(body)
        try:
            await self._over
        finally:
            self._answer = None
        return b"".join(self._parts)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        if not self._parts and not data.startswith(b"HTTP/1.1 200"):
            self._fail(data[:400].decode(errors="replace"))
            return
        now_s = time.perf_counter() - self._began_s
        seen = self._tail + data
        answer.times_s += [now_s] * seen.count(_EVENT)
        self._tail = seen[1 - len(_EVENT) :]
        self._parts.append(data)
        if seen.endswith(_END):
            answer.ended_s = now_s
            self._answer = None
            self._over.set_result(None)

    def _fail(self, error: str) -> None:
        assert self._answer is not None
        self._answer.error = error
        self._answer = None
        self.is_usable = False
        if self.transport is not None:
            self.transport.abort()
        self._over.set_result(None)


class _Generator:
    """Carries out one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._idle: list[_Connection] = []
        self.answers = [Answer(request.due_s, len(request.prompt)) for request in plan.requests]

    async def run(self) -> None:
        """Sends everything; returns when all have ended or the time is up."""
        bodies = [_encoded(self._plan, request) for request in self._plan.requests]
        places = asyncio.Semaphore(self._plan.at_once or len(bodies) + 1)
        gc.collect()
        gc.disable()
        self._began_s = time.perf_counter()
        kept: list[bytes] = [b""] * len(bodies)

        async def one(i: int) -> None:
            await asyncio.sleep(max(0.0, self.answers[i].due_s - (time.perf_counter() - self._began_s)))
            async with places:
                kept[i] = await self._send(bodies[i], self.answers[i])

        tasks = [asyncio.create_task(one(i)) for i in range(len(bodies))]
        _, late = await asyncio.wait(tasks, timeout=self._plan.stop_s) if tasks else (set(), set())
        for task in late:
            task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(end, Exception):  # a fault of ours, not of the server
                raise end
        for answer, data in zip(self.answers, kept, strict=True):
            if answer.ended_s is None:
                answer.error = answer.error or "cut off"
            elif answer.error is None:
                _parse(answer, data, keeps_text=self._plan.keeps_text)

    async def _send(self, body: bytes, answer: Answer) -> bytes:
        if self._plan.at_once is not None:
            answer.due_s = time.perf_counter() - self._began_s
        connection = None
        while self._idle and (connection is None or not connection.is_usable):
            connection = self._idle.pop()
        if connection is None or not connection.is_usable:
            loop = asyncio.get_running_loop()
            try:
                _, connection = await loop.create_connection(_Connection, "127.0.0.1", self._plan.port)
            except OSError as error:
                answer.error = f"cannot connect: {error}"
                return b""
        data = await connection.carry(body, answer, self._began_s, keeps_all=self._plan.keeps_text)
        if connection.is_usable:
            self._idle.append(connection)
        return data


def _encoded(plan: Plan, request: Request) -> bytes:
    fields = {
        "prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "headrace": {"timing": True},
    }  # fmt: skip
    if plan.logprobs is not None:
        fields["logprobs"] = plan.logprobs
    body = msgspec.json.encode(fields)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{plan.port}\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def _parse(answer: Answer, data: bytes, *, keeps_text: bool) -> None:
    """Takes usage and walk from the reply's end, and the text if all of it was kept."""
    for line in data.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        try:
            event = json.loads(line[6:])
        except ValueError:  # a line whose beginning was not kept, or one across two HTTP chunks
            continue
        if "error" in event:
            answer.error = json.dumps(event["error"])
        if usage := event.get("usage"):
            answer.num_tokens = usage["completion_tokens"]
            answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        answer.walk = event.get("headrace") or answer.walk
        if keeps_text and event.get("choices"):
            choice = event["choices"][0]
            answer.text += choice["text"]
            answer.gaps += _gaps(choice.get("logprobs"))


def _gaps(logprobs: dict[str, Sequence[dict[str, float]]] | None) -> list[float]:
    best = [sorted(top.values())[-2:] for top in (logprobs or {}).get("top_logprobs") or ()]
    return [values[-1] - values[0] if len(values) > 1 else 0.0 for values in best]


def main() -> None:
    """The child: a plan in, answers out."""
    generator = _Generator(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Plan))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(generator.run())
    sys.stdout.buffer.write(msgspec.msgpack.encode(generator.answers))


if __name__ == "__main__":
    main()
