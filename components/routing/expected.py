"""What live placements will bring: blocks that a worker is going to hold, before its events tell.

    expected   placed: the prompt's blocks that the worker lacked, in order
    arrived    an event told of them: the index knows them from now on
    dropped    the placement has ended, has waited too long, or its generating worker has the whole prompt

They are what makes a burst of equal prompts stay together, and their number is the prefill work that a worker has
before it: each block counts once, however many placements wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

EXPECTED_S = 60.0
"""How long a placement's blocks are waited for; a worker that caches nothing never tells."""


class Promise(msgspec.Struct):
    """The blocks that one placement was the first to bring to one worker."""

    worker: str
    keys: Sequence[int]


class _Placement(msgspec.Struct):
    """The promises of one placement, its generating worker's first."""

    key: str
    promises: Sequence[Promise]
    at_s: float


class Expected:
    """Blocks expected at each worker (by boot)."""

    def __init__(self) -> None:
        self._keys: dict[str, set[int]] = {}
        self._live: dict[str, _Placement] = {}
        self._order: deque[_Placement] = deque()  # the oldest first; those that were dropped hold no promises
        self._pairs: dict[str, dict[str, None]] = {}  # generating worker -> placements with a prefill worker beside it

    def count(self, worker: str) -> int:
        """How many blocks a worker has yet to compute or to fetch."""
        return len(self._keys.get(worker, ()))

    def extend(self, overlaps: dict[str, int], keys: Sequence[int]) -> dict[str, int]:
        """The overlaps with what is expected behind them; the given ones stay as they are."""
        extended, total, depth_of = overlaps, len(keys), overlaps.get
        for worker, expected in self._keys.items():
            start = depth_of(worker, 0)
            if start >= total or keys[start] not in expected:  # so it is for nearly all workers
                continue
            depth = start + 1
            while depth < total and keys[depth] in expected:
                depth += 1
            if extended is overlaps:
                extended = dict(overlaps)
            extended[worker] = depth
        return extended

    def expect(self, key: str, promises: Sequence[Promise], now_s: float) -> None:
        """A placement brings blocks to its workers, which have them neither in the cache nor before them."""
        promises = [promise for promise in promises if promise.keys]
        if not promises:
            return
        self._live[key] = placement = _Placement(key, promises, now_s)
        self._order.append(placement)
        for promise in promises:
            self._keys.setdefault(promise.worker, set()).update(promise.keys)
        if len(promises) > 1:
            self._pairs.setdefault(promises[0].worker, {})[key] = None

    def arrived(self, worker: str, keys: Iterable[int]) -> tuple[str, ...]:
        """A worker told that it holds these blocks. Returns the other workers that have less to do by that."""
        self._take(worker, keys)
        expected = self._keys.get(worker, set())
        concerned: tuple[str, ...] = ()
        for key in tuple(self._pairs.get(worker, ())):
            if self._live[key].promises[0].keys[-1] not in expected:
                concerned += self.drop(key)
        return concerned

    def drop(self, key: str) -> tuple[str, ...]:
        """A placement brings nothing more; returns the workers it concerned."""
        placement = self._live.pop(key, None)
        if placement is None:
            return ()
        promises, placement.promises = placement.promises, ()
        for promise in promises:
            self._take(promise.worker, promise.keys)
        if len(promises) > 1:
            pairs = self._pairs[promises[0].worker]
            del pairs[key]
            if not pairs:
                del self._pairs[promises[0].worker]
        while self._order and not self._order[0].promises:
            self._order.popleft()
        return tuple(promise.worker for promise in promises)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Drops what was waited for too long; returns the workers it concerned."""
        concerned: tuple[str, ...] = ()
        while self._order and now_s - self._order[0].at_s >= EXPECTED_S:
            concerned += self.drop(self._order[0].key)
        return concerned

    def forget(self, worker: str) -> None:
        """A worker is gone, or told its blocks anew."""
        self._keys.pop(worker, None)

    def _take(self, worker: str, keys: Iterable[int]) -> None:
        expected = self._keys.get(worker)
        if expected is not None:
            expected.difference_update(keys)
            if not expected:
                del self._keys[worker]
