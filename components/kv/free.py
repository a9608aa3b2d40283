"""Free block ids, kept as runs of neighbours, so that what is allocated together lies together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

_RUNS_LOOKED_AT = 128


class FreeBlocks:
    """A set of block ids as maximal runs [start, stop). Neighbouring blocks travel as one piece."""

    def __init__(self, num_blocks: int) -> None:
        self._stop_of = {0: num_blocks} if num_blocks else {}
        self._start_of = {num_blocks: 0} if num_blocks else {}
        self._count = num_blocks

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start, stop in self._stop_of.items():
            yield from range(start, stop)

    def take(self, count: int, *, after: int | None = None) -> list[int]:
        """Removes and returns `count` ids, first the neighbours that follow block `after`."""
        assert count <= self._count, f"{count} blocks asked of {self._count} free ones"
        taken: list[int] = []
        if after is not None and after + 1 in self._stop_of:
            taken += self._cut(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._cut(self._best_run(missing), missing)
        return taken

    def put(self, block: int) -> None:
        """Returns a block and joins it to its neighbours."""
        start, stop = block, block + 1
        if block in self._start_of:
            start = self._start_of.pop(block)
            del self._stop_of[start]
        if stop in self._stop_of:
            old, stop = stop, self._stop_of.pop(stop)
            assert self._start_of.pop(stop) == old
        self._stop_of[start] = stop
        self._start_of[stop] = start
        self._count += 1

    def _cut(self, start: int, count: int) -> range:
        """Removes up to `count` ids from the front of the run at `start`."""
        stop = self._stop_of.pop(start)
        del self._start_of[stop]
        end = min(stop, start + count)
        if end < stop:
            self._stop_of[end] = stop
            self._start_of[stop] = end
        self._count -= end - start
        return range(start, end)

    def _best_run(self, count: int) -> int:
        """The start of the shortest run that holds `count` ids, else of the longest; among the first few."""
        runs = list(islice(self._stop_of.items(), _RUNS_LOOKED_AT))
        enough = [(stop - start, start) for start, stop in runs if stop - start >= count]
        return min(enough)[1] if enough else max((stop - start, start) for start, stop in runs)[1]
