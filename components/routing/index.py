"""The index of blocks: which worker holds which prefix, as its events tell.

Chained hashes make equal prefixes equal keys, so blocks are kept in runs: stretches of one chain, each entered at
its first block alone. A prompt is followed run by run, with one look-up and one comparison for each, whatever the
number of its blocks; along a run every worker holds the blocks [0, held).

Life of a run:

    begun      by the first block whose predecessor ends no run
    grown      by a block stored after its last one
    cut        its last blocks are held by nobody any more
    gone       none is left

A worker may drop a block and keep later ones. Those are loose: remembered, reached by nothing until the gap closes.
A key is the first half of a block's hash: should two ever collide, a prediction is wrong, never a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import takewhile

from components.messages import BLOCK_HASH_BYTES

_RUN_BYTES = 700
"""A run's own memory: the object, its array, its holders (measured, 1 to 4 holders)."""

_BLOCK_BYTES = 56
"""A key's memory beside the table's: the integer, and its place in the run."""


def block_keys(hashes: bytes) -> list[int]:
    """The keys of packed block hashes."""
    words = BLOCK_HASH_BYTES // 8
    return array("Q", hashes[: len(hashes) // BLOCK_HASH_BYTES * BLOCK_HASH_BYTES])[::words].tolist()


class Run:
    """Consecutive blocks of one chain. `held[w]` is how many of the first ones worker `w` holds."""

    __slots__ = ("held", "keys", "loose")

    def __init__(self) -> None:
        self.keys = array("Q")
        self.held: dict[str, int] = {}
        self.loose: dict[str, set[int]] = {}  # positions held beyond a gap; rarely any

    def common(self, keys: Sequence[int], start: int, first: int = 0) -> int:
        """How many of its blocks from `first` on `keys[start:]` begins with.

        In chains, equal at one position means equal up to there.
        """
        own = self.keys
        low, high = 0, min(len(own) - first, len(keys) - start)
        if own[first + high - 1] == keys[start + high - 1]:
            return high
        while low < high:
            middle = (low + high) // 2
            if own[first + middle] == keys[start + middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def position(self, key: int, guess: int) -> int:
        """Where `key` stands; it is there."""
        if 0 <= guess < len(self.keys) and self.keys[guess] == key:
            return guess
        return self.keys.index(key)

    def add(self, worker: str, first: int, count: int) -> int:
        """The worker holds `count` blocks from `first` on; returns how many of them are news."""
        held = self.held.get(worker, 0)
        loose = self.loose.get(worker)
        if loose is None and first <= held:
            self.held[worker] = max(held, first + count)
            return max(0, first + count - held)
        loose = loose or set()
        news = set(range(max(first, held), first + count)) - loose
        loose |= news
        while held in loose:
            loose.remove(held)
            held += 1
        if held:
            self.held[worker] = held
        self._set_loose(worker, loose)
        return len(news)

    def drop(self, worker: str, position: int) -> bool:
        """The worker holds this block no more; False if it did not."""
        held = self.held.get(worker, 0)
        loose = self.loose.get(worker, set())
        if position >= held:
            was_held = position in loose
            loose.discard(position)
        else:
            was_held = True
            loose = loose | set(range(position + 1, held))
            self.held[worker] = position
            if not position:
                del self.held[worker]
        self._set_loose(worker, loose)
        return was_held

    def forget(self, worker: str) -> int:
        """The worker holds nothing of it any more; how many blocks that were."""
        return self.held.pop(worker, 0) + len(self.loose.pop(worker, ()))

    def holds(self, worker: str) -> bool:
        """Whether the worker holds any of it."""
        return worker in self.held or worker in self.loose

    def surplus(self) -> array[int]:
        """Takes off, and returns, its last blocks that nobody holds."""
        needed = max(self.held.values(), default=0)
        for positions in self.loose.values():
            needed = max(needed, max(positions) + 1)
        rest = self.keys[needed:]
        del self.keys[needed:]
        return rest

    def _set_loose(self, worker: str, positions: set[int]) -> None:
        if positions:
            self.loose[worker] = positions
        else:
            self.loose.pop(worker, None)


class BlockIndex:
    """Which worker (by boot) holds which blocks. At most `max_blocks` different ones; what comes beyond is counted."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_dropped = 0
        self._run_of: dict[int, Run] = {}
        self._runs: dict[str, dict[Run, None]] = {}  # worker -> runs it holds some of
        self._counts: dict[str, int] = {}
        self._num_runs = 0

    def __len__(self) -> int:
        """Different blocks that are indexed, those in a gap that nobody fills included."""
        return len(self._run_of)

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        return self._run_of.__sizeof__() + _BLOCK_BYTES * len(self._run_of) + _RUN_BYTES * self._num_runs

    def count(self, worker: str) -> int:
        """How many blocks a worker holds."""
        return self._counts.get(worker, 0)

    def overlaps(self, keys: Sequence[int]) -> dict[str, int]:
        """How many of the first blocks of a chain each worker holds, of those that hold any."""
        depths: dict[str, int] = {}
        start, total = 0, len(keys)
        while start < total and (run := self._run_of.get(keys[start])) is not None:
            common = run.common(keys, start)
            reached = start + common
            for worker, held in run.held.items():
                if not start or depths.get(worker) == start:  # else it stopped before
                    depths[worker] = reached if held >= common else start + held
            start = reached
            if not common or start not in depths.values():
                break
        return depths

    def keys_of(self, worker: str) -> set[int]:
        """All blocks of a worker; for tests and for whoever wants to compare."""
        found: set[int] = set()
        for run in self._runs.get(worker, ()):
            found.update(run.keys[: run.held.get(worker, 0)])
            found.update(run.keys[position] for position in run.loose.get(worker, ()))
        return found

    def store(self, worker: str, parent: int | None, keys: Sequence[int]) -> None:
        """A worker holds these consecutive blocks of a chain now; `parent` comes before the first."""
        runs = self._runs.setdefault(worker, {})
        before = None if parent is None else self._run_of.get(parent)
        start, added = 0, 0
        while start < len(keys):
            run = self._run_of.get(keys[start])
            if run is not None:
                first = run.position(keys[start], run.held.get(worker, 0))
                count = run.common(keys, start, first)
            else:
                run, count = self._enter(keys, start, before, parent)
                if not count:
                    break
                first = len(run.keys) - count
            added += run.add(worker, first, count)
            runs[run] = None
            start += count
            before, parent = run, keys[start - 1]
        self.num_dropped += len(keys) - start
        self._counts[worker] = self._counts.get(worker, 0) + added

    def remove(self, worker: str, keys: Sequence[int]) -> None:
        """A worker holds these blocks no more, in whatever order they stand."""
        gone = 0
        for key in keys:
            run = self._run_of.get(key)
            if run is None or not run.holds(worker):
                continue
            position = run.position(key, run.held.get(worker, 0) - 1)
            gone += run.drop(worker, position)
            if not run.holds(worker):
                del self._runs[worker][run]
            if position == len(run.keys) - 1:
                self._trim(run)
        self._counts[worker] = self._counts.get(worker, 0) - gone

    def forget(self, worker: str) -> None:
        """A worker holds nothing any more."""
        for run in self._runs.pop(worker, ()):
            run.forget(worker)
            self._trim(run)
        self._counts.pop(worker, None)

    def _enter(self, keys: Sequence[int], start: int, before: Run | None, parent: int | None) -> tuple[Run, int]:
        """Puts new blocks behind their parent, if that ends a run, or begins one; how many, 0 if the index is full."""
        known = self._run_of
        rest = keys[start:] if start else keys
        if not known.keys().isdisjoint(rest):
            rest = list(takewhile(lambda key: key not in known, rest))
        room = self.max_blocks - len(known)
        if room < len(rest):
            rest = rest[:room]
        run = before
        if run is None or run.keys[-1] != parent:
            run = Run()
            self._num_runs += bool(rest)
        run.keys.extend(rest)
        known.update(dict.fromkeys(rest, run))
        return run, len(rest)

    def _trim(self, run: Run) -> None:
        for key in run.surplus():
            del self._run_of[key]
        self._num_runs -= not run.keys


def chains(hashes: bytes, parents: bytes) -> Iterator[tuple[int | None, list[int]]]:
    """Packed blocks with the hash before each, as stretches of consecutive ones for `BlockIndex.store`."""
    keys, before = block_keys(hashes), block_keys(parents)
    if len(before) != len(keys):
        yield from ((None, [key]) for key in keys)
        return
    start = 0
    while start < len(keys):
        follows = takewhile(lambda at: before[at] == keys[at - 1], range(start + 1, len(keys)))
        stop = start + 1 + sum(1 for _ in follows)
        yield before[start], keys[start:stop]
        start = stop
