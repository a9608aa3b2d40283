"""A self-verifying load over real NIXL: every answer is known, clients leave, prefill workers die and freeze."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import SHM, FaultyGraph, Reply, faulty, make_question

NUM_CLIENTS = 8


class Load:
    """Random requests, a share of which hangs up somewhere; every answer is checked."""

    def __init__(self, graph: FaultyGraph, num_requests: int, *, seed: int) -> None:
        self.replies: list[Reply] = []
        self._graph = graph
        self._left = num_requests
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def run(self) -> None:
        """Returns when all requests have ended."""
        clients = [threading.Thread(target=self._client) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    @property
    def outcomes(self) -> dict[str, int]:
        """How many requests ended in which way."""
        return {kind: sum(r.outcome == kind for r in self.replies) for kind in ("right", "error", "left", "WRONG")}

    def _client(self) -> None:
        while True:
            with self._lock:
                if not self._left:
                    return
                self._left -= 1
                length = self._random.choice([5, 16, 17, 64, 65, 150, 300])
                question = make_question(self._random.randrange(1_000), length)
                leave_after_s = self._random.random() * 0.3 if self._random.random() < 0.2 else None
            reply = self._graph.ask(question, leave_after_s=leave_after_s)
            with self._lock:
                self.replies.append(reply)


def torment(graph: FaultyGraph, stop: threading.Event, *, seed: int, pause_s: float) -> None:
    """Kills or freezes the prefill worker again and again; ends with it running."""
    dice = random.Random(seed)
    while not stop.wait(pause_s * (0.5 + dice.random())):
        for pid in graph.served.pids("prefill"):
            try:
                if dice.random() < 0.4:
                    os.kill(pid, signal.SIGKILL)
                    continue
                os.kill(pid, signal.SIGSTOP)
                time.sleep(dice.random() * 2.5)  # beyond the transfer's timeout, now and then
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # dead already


def run(folder: Path, num_requests: int, *, seed: int, pause_s: float) -> dict[str, int]:
    """Loads and torments one graph; what it holds must be free in the end, and prefill in use again."""
    stop = threading.Event()
    with faulty(folder, SHM) as graph:
        load = Load(graph, num_requests, seed=seed)
        tormentor = threading.Thread(target=torment, args=(graph, stop), kwargs={"seed": seed, "pause_s": pause_s})
        tormentor.start()
        try:
            load.run()
        finally:
            stop.set()
            tormentor.join()
        assert [reply for reply in load.replies if reply.outcome in ("WRONG", "error")] == []
        graph.wait_linked()
        graph.assert_clean()
        return load.outcomes


@pytest.mark.timeout(180)
def test_a_short_load(tmp_path: Path) -> None:
    outcomes = run(tmp_path, 150, seed=1, pause_s=2.0)

    assert outcomes["right"] > 100


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_two_thousand_requests(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    outcomes = run(tmp_path, 2_000, seed=2, pause_s=4.0)
    for outcome, count in outcomes.items():
        record_property(outcome, count)

    assert sum(outcomes.values()) == 2_000
    assert outcomes["right"] > 1_500
