"""A virtual clock that looks like an event loop: what is due happens in order, at once, and always the same way."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Timer:
    """A call to come."""

    def __init__(self, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._callback = callback
        self._args = args
        self._is_cancelled = False

    def cancel(self) -> None:
        """It will not come."""
        self._is_cancelled = True

    def run(self) -> None:
        """It comes."""
        if not self._is_cancelled:
            self._callback(*self._args)


class VirtualLoop:
    """The part of an event loop that the router and the simulated workers use."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._order = count()
        self._due: list[tuple[float, int, Timer]] = []

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def call_at(self, when_s: float, callback: Callable[..., None], *args: Any) -> Timer:
        """As an event loop's."""
        timer = Timer(callback, args)
        heapq.heappush(self._due, (max(when_s, self._now_s), next(self._order), timer))
        return timer

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Timer:
        """As an event loop's."""
        return self.call_at(self._now_s + delay_s, callback, *args)

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self._now_s, _, timer = heapq.heappop(self._due)
            timer.run()
