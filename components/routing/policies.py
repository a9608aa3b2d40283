"""Policies: which of several workers serves a request. Pure functions over what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from components.routing.view import WorkerView
from graph.words import counted

Amount = TypeVar("Amount", float, tuple[int, int])


class Question(msgspec.Struct, frozen=True):
    """One request to place. `turn` counts the router's requests, `luck` in [0, 1) breaks ties."""

    num_tokens: int
    hash_unit: int = 16
    overlaps: Mapping[str, int] = {}  # hash units of the prompt that a worker (by boot) will hold
    turn: int = 0
    luck: float = 0.0

    def missing_tokens(self, boot: str) -> int:
        """Prompt tokens that a worker has to compute; the last one always."""
        return max(1, self.num_tokens - self.overlaps.get(boot, 0) * self.hash_unit)


class Choice(msgspec.Struct, frozen=True):
    """The worker, and why it."""

    worker: WorkerView
    reason: str


Policy = Callable[[Sequence[WorkerView], Question], Choice]
"""Chooses among at least one worker, all of which could serve the request."""


def round_robin(workers: Sequence[WorkerView], question: Question) -> Choice:
    """Each in its turn, in the order of their ids."""
    place = question.turn % len(workers)
    return Choice(workers[place], f"turn {place + 1} of {len(workers)}")


def least_busy(workers: Sequence[WorkerView], question: Question) -> Choice:
    """The one with the least to do; among equals, any."""
    chosen = _least(workers, [_busy(worker) for worker in workers], question.luck)
    return Choice(chosen, _spell(chosen))


def kv(workers: Sequence[WorkerView], question: Question) -> Choice:
    """The one where the request costs least; among equals, any. See `components.routing.cost`."""
    num_tokens, unit = question.num_tokens, question.hash_unit
    missing = {boot: max(1, num_tokens - depth * unit) for boot, depth in question.overlaps.items()}.get
    # `cost.cost`, spelled out: this is done for every worker and every request.
    costs = [worker.standing + worker.rate * missing(worker.boot, num_tokens) for worker in workers]
    chosen = _least(workers, costs, question.luck)
    return Choice(
        chosen,
        f"least cost {min(costs):.0f}: {question.missing_tokens(chosen.boot)} of {counted(num_tokens, 'token')} "
        f"missing, {chosen.queued_tokens} queued, {counted(chosen.requests, 'request')}",
    )


POLICIES: dict[str, Policy] = {"round_robin": round_robin, "least_busy": least_busy, "kv": kv}


def _least(workers: Sequence[WorkerView], amounts: Sequence[Amount], luck: float) -> WorkerView:
    least = min(amounts)
    if amounts.count(least) == 1:
        return workers[amounts.index(least)]
    equals = [worker for worker, amount in zip(workers, amounts, strict=True) if amount == least]
    return equals[int(luck * len(equals))]


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
        return f"least busy: {counted(load.prefill_tokens + worker.pending_tokens, 'prompt token')} queued"
    return f"least busy: {worker.placed} placed, {load.running} running, {load.waiting} waiting"
