"""The workers a router knows: role, reported load, and the placements that are alive on each.

Life of a worker here:

    unknown    not ready, or its first snapshot has not come
    known      a snapshot told role, load and blocks; events keep them up to date
    lost       draining, gone, or back with another boot: forgotten, its placements count no more
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from components.messages import Load, LoadChanged, Role, WorkerSnapshot
from components.routing import cost
from components.routing.blocks import Blocks
from components.routing.view import WorkerView

PENDING_S = 0.5
"""How long a placement's prompt counts on its prefill worker before the worker's own reports tell."""


class Placed(msgspec.Struct, frozen=True):
    """One placement on its workers, by boot, so that a worker's next life starts empty."""

    boots: tuple[str, ...]
    num_tokens: int
    at_s: float


class _Known(msgspec.Struct, frozen=True):
    id: str
    boot: str
    role: Role
    load: Load


class Workers:
    """The book of workers, their blocks and the live placements. Pure bookkeeping; the router tells it what happened.

    A view is made anew only when something changed for its worker.
    """

    def __init__(self, blocks: Blocks, *, hash_unit: int) -> None:
        self._blocks = blocks
        self.hash_unit = hash_unit
        self._known: dict[str, _Known] = {}
        self._ids: dict[str, str] = {}  # boot -> id
        self._views: dict[str, WorkerView | None] = {}  # in the order of ids; None: to be made anew
        self._live: dict[str, Placed] = {}
        self._num_live: Counter[str] = Counter()  # by boot
        self._fresh: deque[Placed] = deque()  # the placements of the last PENDING_S, ended or not
        self._pending: Counter[str] = Counter()  # their tokens, by boot

    @property
    def num_placements(self) -> int:
        """Placements that are alive."""
        return len(self._live)

    def learn(self, id: str, boot: str, snapshot: WorkerSnapshot) -> None:
        """A snapshot came: it replaces what was known."""
        self.forget(id)
        self._known[id] = _Known(id, boot, snapshot.role, snapshot.load)
        self._ids[boot] = id
        self._views = dict.fromkeys(sorted(self._known))
        self._blocks.replace(boot, snapshot)

    def apply(self, id: str, event: Any) -> None:
        """A worker told of its load or its blocks; one that is not known yet will send a snapshot."""
        known = self._known.get(id)
        if known is None:
            return
        if isinstance(event, LoadChanged):
            self._known[id] = msgspec.structs.replace(known, load=event.load)
        else:
            self._touch(self._blocks.apply(known.boot, event))
        self._views[id] = None

    def forget(self, id: str) -> None:
        """The worker is ready no more."""
        known = self._known.pop(id, None)
        if known is not None:
            self._blocks.forget(known.boot)
            del self._ids[known.boot], self._views[id]

    def place(
        self, key: str, stages: Sequence[tuple[str, int]], keys: Sequence[int], num_tokens: int, now_s: float
    ) -> None:
        """Counts a placement until `end(key)` on its workers (id and overlap, the generating one first)."""
        placed = Placed(tuple(self._known[id].boot for id, _ in stages), num_tokens, now_s)
        self._live[key] = placed
        self._fresh.append(placed)
        overlaps = [overlap for _, overlap in stages]
        self._blocks.place(key, tuple(zip(placed.boots, overlaps, strict=True)), keys, now_s)
        for boot in placed.boots:
            self._num_live[boot] += 1
            self._pending[boot] += num_tokens
        self._touch(placed.boots)

    def end(self, key: str) -> None:
        """The placement's request has ended. Idempotent."""
        placed = self._live.pop(key, None)
        if placed is None:
            return
        self._blocks.expected.drop(key)
        for boot in placed.boots:
            _take(self._num_live, boot, 1)
        self._touch(placed.boots)

    def views(self, now_s: float) -> list[WorkerView]:
        """All known workers by id, with what is placed on them now."""
        while self._fresh and now_s - self._fresh[0].at_s >= PENDING_S:
            old = self._fresh.popleft()
            for boot in old.boots:
                _take(self._pending, boot, old.num_tokens)
            self._touch(old.boots)
        self._touch(self._blocks.expected.expire(now_s))
        views = self._views
        return [view or self._renew(id) for id, view in views.items()]

    def _renew(self, id: str) -> WorkerView:
        known = self._known[id]
        load, boot = known.load, known.boot
        placed, reported = self._num_live[boot], load.running + load.waiting
        # Of the tokens a worker reports as queued, those of placements here are known better: less what is cached.
        unknown_tokens = load.prefill_tokens * max(0, reported - placed) // max(1, reported)
        requests = max(placed, reported)
        queued_tokens = self._blocks.expected.count(boot) * self.hash_unit + unknown_tokens
        fill = min(1.0, self._blocks.index.count(boot) / load.blocks_total) if load.blocks_total else 0.0
        self._views[id] = view = WorkerView(
            id=id,
            boot=boot,
            role=known.role,
            load=load,
            placed=placed,
            pending_tokens=self._pending[boot],
            requests=requests,
            queued_tokens=queued_tokens,
            fill=fill,
            standing=cost.standing(known.role, queued_tokens, requests),
            rate=cost.rate(known.role, fill),
        )
        return view

    def _touch(self, boots: Iterable[str]) -> None:
        for boot in boots:
            id = self._ids.get(boot)
            if id is not None:
                self._views[id] = None


def _take(counts: Counter[str], key: str, amount: int) -> None:
    """Subtracts; nothing is kept of a boot that has nothing left."""
    counts[key] -= amount
    if counts[key] <= 0:
        del counts[key]
