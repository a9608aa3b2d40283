"""The workers a router knows: role, reported load, and the placements that are alive on each.

Life of a worker here:

    unknown    not ready, or its first snapshot has not come
    known      a snapshot told role and load; events keep the load up to date
    lost       draining, gone, or back with another boot: forgotten, its placements count no more
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Literal

import msgspec

from components.messages import Load

Role = Literal["worker", "prefill", "decode"]

PENDING_S = 0.5
"""How long a placement's prompt counts on its prefill worker before the worker's own reports tell."""


class WorkerView(msgspec.Struct, frozen=True):
    """What a policy sees of one worker."""

    id: str
    boot: str
    role: Role
    load: Load = Load()
    placed: int = 0  # live placements of this router
    pending_tokens: int = 0  # prompt tokens placed just now, perhaps not in `load` yet


class Placed(msgspec.Struct, frozen=True):
    """One placement on its workers, by boot, so that a worker's next life starts empty."""

    boots: tuple[str, ...]
    num_tokens: int
    at_s: float


class Workers:
    """The book of workers and live placements. Pure bookkeeping; the router tells it what happened."""

    def __init__(self) -> None:
        self._known: dict[str, WorkerView] = {}
        self._live: dict[str, Placed] = {}
        self._num_live: Counter[str] = Counter()  # by boot
        self._fresh: deque[Placed] = deque()  # the placements of the last PENDING_S, ended or not
        self._pending: Counter[str] = Counter()  # their tokens, by boot

    def learn(self, id: str, boot: str, role: Role, load: Load) -> None:
        """A snapshot came: it replaces what was known."""
        self._known[id] = WorkerView(id, boot, role, load)
        self._known = dict(sorted(self._known.items()))

    def report(self, id: str, load: Load) -> None:
        """A worker told its load; one that is not known yet will send a snapshot."""
        if id in self._known:
            self._known[id] = msgspec.structs.replace(self._known[id], load=load)

    def forget(self, id: str) -> None:
        """The worker is ready no more."""
        self._known.pop(id, None)

    def place(self, key: str, ids: Iterable[str], num_tokens: int, now_s: float) -> None:
        """Counts a placement on these workers until `end(key)`."""
        placed = Placed(tuple(self._known[id].boot for id in ids), num_tokens, now_s)
        self._live[key] = placed
        self._fresh.append(placed)
        for boot in placed.boots:
            self._num_live[boot] += 1
            self._pending[boot] += num_tokens

    def end(self, key: str) -> None:
        """The placement's request has ended. Idempotent."""
        placed = self._live.pop(key, None)
        for boot in placed.boots if placed else ():
            _take(self._num_live, boot, 1)

    @property
    def num_placements(self) -> int:
        """Placements that are alive."""
        return len(self._live)

    def views(self, now_s: float) -> list[WorkerView]:
        """All known workers by id, with what is placed on them now."""
        while self._fresh and now_s - self._fresh[0].at_s >= PENDING_S:
            old = self._fresh.popleft()
            for boot in old.boots:
                _take(self._pending, boot, old.num_tokens)
        live, pending = self._num_live, self._pending
        return [
            WorkerView(known.id, known.boot, known.role, known.load, live[known.boot], pending[known.boot])
            for known in self._known.values()
        ]


def _take(counts: Counter[str], key: str, amount: int) -> None:
    """Subtracts; nothing is kept of a boot that has nothing left."""
    counts[key] -= amount
    if counts[key] <= 0:
        del counts[key]
