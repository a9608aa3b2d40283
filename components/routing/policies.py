"""Policies: which of several workers serves a request. Pure functions over what is known of them.

A policy that looks at block hashes finds them in the question; what it needs to know of each worker
beyond its load becomes a field of `WorkerView`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from components.routing.workers import WorkerView


class Question(msgspec.Struct, frozen=True):
    """One request to place. `turn` counts the router's requests, `luck` in [0, 1) breaks ties."""

    num_tokens: int
    hashes: bytes = b""
    turn: int = 0
    luck: float = 0.0


class Choice(msgspec.Struct, frozen=True):
    """The worker, and why it."""

    worker: WorkerView
    reason: str
    overlap_blocks: int = 0


Policy = Callable[[Sequence[WorkerView], Question], Choice]
"""Chooses among at least one worker, all of which could serve the request."""


def round_robin(workers: Sequence[WorkerView], question: Question) -> Choice:
    """Each in its turn, in the order of their ids."""
    place = question.turn % len(workers)
    return Choice(workers[place], f"turn {place + 1} of {len(workers)}")


def least_busy(workers: Sequence[WorkerView], question: Question) -> Choice:
    """The one with the least to do; among equals, any."""
    busy = [_busy(worker) for worker in workers]
    least = min(busy)
    idle = [worker for worker, amount in zip(workers, busy, strict=True) if amount == least]
    chosen = idle[int(question.luck * len(idle))]
    return Choice(chosen, _spell(chosen))


POLICIES: dict[str, Policy] = {"round_robin": round_robin, "least_busy": least_busy}


def _busy(worker: WorkerView) -> tuple[int, int]:
    """Prefill workers compare by the tokens before them, the others by requests.

    A placement lives on after its prompt was computed, so on a prefill worker it says little. A
    request counts twice once its worker reports it; so it does on every worker.
    """
    requests = worker.placed + worker.load.running + worker.load.waiting
    if worker.role == "prefill":
        return (worker.load.prefill_tokens + worker.pending_tokens, requests)
    return (requests, worker.load.blocks_used)


def _spell(worker: WorkerView) -> str:
    load = worker.load
    if worker.role == "prefill":
        return f"least busy: {load.prefill_tokens + worker.pending_tokens} prompt tokens queued"
    return f"least busy: {worker.placed} placed, {load.running} running, {load.waiting} waiting"
