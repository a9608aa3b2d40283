"""Deadlines of many calls with one timer: a lazy heap that looks at a call only when it may be late."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from typing import Protocol

_MIN_SWEEP = 1024


class Timed(Protocol):
    """Something whose deadline may move later, or vanish with its end."""

    deadline: float  # on the loop's clock
    is_closed: bool

    def expire(self) -> None:
        """The deadline has passed."""


class Deadlines:
    """One entry per open call; an entry that comes up early is put back at the call's new deadline."""

    def __init__(self, loop: asyncio.AbstractEventLoop, drain: Callable[[], None]) -> None:
        self._loop = loop
        self._drain = drain
        self._heap: list[tuple[float, int, Timed]] = []
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = math.inf
        self._is_checking = False
        self._sweep_at = _MIN_SWEEP

    def add(self, timed: Timed) -> None:
        """Watches `timed` until it is closed."""
        if timed.deadline == math.inf:
            return
        self._count += 1
        heapq.heappush(self._heap, (timed.deadline, self._count, timed))
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        self._arm()

    def close(self) -> None:
        """Watches nothing any more."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        # Calls that ended long before their deadline; amortised, each add pays for about one of them.
        self._heap = [entry for entry in self._heap if not entry[2].is_closed]
        heapq.heapify(self._heap)
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._heap))

    def _arm(self) -> None:
        if not self._heap or self._is_checking:
            return
        first = self._heap[0][0]
        if self._timer is not None:
            if self._armed_for <= first:
                return
            self._timer.cancel()
        self._armed_for = first
        self._timer = self._loop.call_at(first, self._check)

    def _check(self) -> None:
        self._timer = None
        self._is_checking = True
        self._drain()  # replies that wait behind a busy loop are not late
        now = self._loop.time()
        while self._heap and self._heap[0][0] <= now:
            timed = heapq.heappop(self._heap)[2]
            if timed.is_closed:
                continue
            if timed.deadline <= now:
                timed.expire()
            else:
                self.add(timed)
        self._is_checking = False
        self._arm()
