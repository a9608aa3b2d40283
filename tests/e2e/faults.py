"""What the fault tests share: faults of `faulty_graph`, requests whose answer is known, and what must be free."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
from harness import ServedGraph, serving
from tokenizers import Tokenizer

from components.engine.fake import fake_generate
from components.messages import Sampling
from components.model_cache import resolve_model
from components.options import DEFAULT_MODEL

GRAPH_FILE = str(Path(__file__).with_name("faulty_graph.py"))
SHM: dict[str, str] = {}
TCP = {"UCX_TLS": "tcp"}
ENDLESS_S = 20.0
"""Longer than any wait may take: a transfer's timeout, a restart, and a slow machine."""

RESTART_S = 90.0
"""Longer than a worker takes to be back, importing and linking included, on a machine that others use too."""

Outcome = Literal["right", "error", "left", "WRONG"]


class Question(msgspec.Struct, frozen=True):
    """A prompt whose greedy answer is known."""

    prompt: tuple[int, ...]
    num_tokens: int = 12

    @property
    def answer(self) -> list[int]:
        """The tokens of an undisturbed run: the fake engine computes them from the KV blocks that it reads."""
        return fake_generate(self.prompt, self.num_tokens, Sampling(temperature=0.0))


class Reply(msgspec.Struct, frozen=True):
    """What came of a question. An error is clean if all text before it was right."""

    outcome: Outcome
    detail: str
    seconds: float
    timing: dict[str, Any] = {}


def make_question(seed: int, length: int = 300) -> Question:
    """A prompt of any length that shares no block with one of another seed."""
    return Question(tuple((seed * 7_919 + i * 104_729) % 40_000 + 300 for i in range(length)))


class FaultyGraph:
    """A running `faulty_graph` and its folder of faults."""

    def __init__(self, served: ServedGraph, folder: Path, tokenizer: Tokenizer) -> None:
        self.served = served
        self.folder = folder
        self._tokenizer = tokenizer
        self._salts = count()

    def arm(self, place: str, fault: str) -> None:
        """Commits `fault` when a request comes to `place` next."""
        (self.folder / f"{place}.taken").unlink(missing_ok=True)
        (self.folder / place).write_text(fault)

    def was_taken(self, place: str) -> bool:
        """Whether the fault armed at `place` was committed."""
        return (self.folder / place).with_suffix(".taken").exists()

    @contextmanager
    def always(self, fault: str) -> Iterator[None]:
        """Keeps a lasting fault in force."""
        file = self.folder / f"always.{fault}"
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    def ask(self, question: Question, *, leave_at: str | None = None, leave_after_s: float | None = None) -> Reply:
        """Asks and compares; hangs up as soon as the fault at `leave_at` was taken, or after a time."""
        began = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.served.port, timeout=ENDLESS_S)
        body = {
            "model": DEFAULT_MODEL,
            "prompt": list(question.prompt),
            "max_tokens": question.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_salt": str(next(self._salts)),
            "headrace": {"timing": True},
        }
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            if leave_at is not None:
                wait_for(lambda: self.was_taken(leave_at))
                return Reply("left", "", time.monotonic() - began)
            if leave_after_s is not None:
                time.sleep(leave_after_s)
                return Reply("left", "", time.monotonic() - began)
            return self._judge(question, connection.getresponse(), began)
        except (OSError, http.client.HTTPException) as error:
            return Reply("WRONG", f"no clean end: {error!r}", time.monotonic() - began)
        finally:
            connection.close()

    def ask_all(self, questions: Sequence[Question]) -> list[Reply]:
        """Asks all at once."""
        replies: list[Reply | None] = [None] * len(questions)

        def ask(i: int) -> None:
            replies[i] = self.ask(questions[i])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(questions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [reply for reply in replies if reply is not None]

    def _judge(self, question: Question, response: http.client.HTTPResponse, began: float) -> Reply:
        want = self._tokenizer.decode(question.answer, skip_special_tokens=False)
        if response.status != 200:
            error = json.loads(response.read())["error"]
            return Reply("error", f"{response.status} {error['message']}", time.monotonic() - began)
        text, finish, timing, error, is_done = "", None, {}, None, False
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                is_done = True
                break
            event = json.loads(data)
            error = event.get("error") or error
            timing = event.get("headrace") or timing
            for choice in event.get("choices", ()):
                text += choice.get("text") or ""
                finish = choice.get("finish_reason") or finish
        seconds = time.monotonic() - began
        if error is not None and want.startswith(text):
            return Reply("error", str(error), seconds)
        if text == want and finish == "length" and is_done:
            return Reply("right", "", seconds, timing)
        return Reply("WRONG", f"got {text!r}, want {want!r}, finish {finish}, done {is_done}", seconds, timing)

    def assert_clean(self) -> None:
        """Fails unless every block, lease and request is gone on both sides, soon. Both must be up."""
        busy = ("kv_blocks_used", "kv_blocks_quarantined", "kv_leases", "requests_running", "requests_waiting")

        def left() -> dict[str, float]:
            found = self.served.metrics()
            return {name: sum(v for _, v in found[f"headrace_{name}"]) for name in busy}

        wait_for(lambda: not any(left().values()), message=lambda: f"left behind: {left()}")

    def wait_linked(self) -> None:
        """Returns when the graph is whole again and a prompt is prefilled remotely."""
        wait_for(lambda: self.served.client.get("/health").json().get("status") == "ready", RESTART_S)
        deadline = time.monotonic() + RESTART_S
        while self.ask(make_question(1, 60)).timing.get("mode") != "remote":
            assert time.monotonic() < deadline, "prefill and decode do not find each other again"
            time.sleep(0.1)


def wait_for(condition: Any, timeout_s: float = ENDLESS_S, message: Any = lambda: "it did not come true") -> None:
    """Waits until `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, message()
        time.sleep(0.03)


@contextmanager
def faulty(folder: Path, environment: dict[str, str], **sets: object) -> Iterator[FaultyGraph]:
    """A running graph of faulty workers; `folder` is an empty one of its own."""
    env = {"HEADRACE_TEST_FAULTS": str(folder), **environment}
    named = {name.replace("__", "."): value for name, value in sets.items()}
    with serving(GRAPH_FILE, log=folder / "serve.log", env=env, sets=named) as served:
        graph = FaultyGraph(served, folder, Tokenizer.from_file(str(resolve_model(DEFAULT_MODEL) / "tokenizer.json")))
        graph.wait_linked()
        yield graph
