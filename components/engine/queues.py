"""Where the engine's sequences stand: the waiting queue, the batch, and those set aside."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from components.engine.sequence import Phase, Sequence

_PULLING = (Phase.MATCHED, Phase.RESERVING, Phase.RESERVED)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class Queue:
    """Sequences by priority, then arrival, with the number of tokens they still have to compute."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __contains__(self, sequence: Sequence) -> bool:
        index = bisect_left(self._items, sequence.order, key=_order)
        return index < len(self._items) and self._items[index] is sequence

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    def add(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._items, sequence.order, key=_order)
        assert self._items[index] is sequence, f"{sequence} is not in this queue"
        del self._items[index]


class Queues:
    """All live sequences: `waiting` (phases waiting and reserving), `running`, and `aside` (the others).

    `computing` names who is about to bring a block into the cache, by the block's key, so that
    others with the same prefix wait for it instead of computing it again.
    """

    def __init__(self) -> None:
        self.waiting = Queue()
        self.running = Queue()
        self.aside: dict[str, Sequence] = {}
        self.pulling: dict[Sequence, None] = {}  # phases matched, reserving, reserved
        self.computing: dict[bytes, Sequence] = {}
        self._by_id: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._by_id.values()))

    def find(self, id: str) -> Sequence | None:
        """The live sequence of this id."""
        return self._by_id.get(id)

    def move(self, sequence: Sequence, phase: Phase) -> None:
        """Changes a sequence's phase and its place with it; a new one is admitted, a finished one forgotten."""
        if sequence.id in self._by_id:
            self._remove(sequence)
        self._by_id[sequence.id] = sequence
        sequence.phase = phase
        if phase in _PULLING:
            self.pulling[sequence] = None
        match phase:
            case Phase.WAITING | Phase.RESERVING:
                self.waiting.add(sequence)
            case Phase.RUNNING:
                self.running.add(sequence)
            case Phase.FINISHED:
                del self._by_id[sequence.id]
            case _:
                self.aside[sequence.id] = sequence

    def claim(self, sequence: Sequence) -> None:
        """Notes that `sequence` is about to compute or receive the blocks of its tokens it does not have yet."""
        for key in sequence.keys(sequence.num_entered, len(sequence)):
            self.computing.setdefault(key, sequence)

    def disclaim(self, sequence: Sequence) -> None:
        """Takes back what `sequence` claimed and has not fulfilled."""
        for key in sequence.keys(sequence.num_entered, len(sequence)):
            if self.computing.get(key) is sequence:
                del self.computing[key]

    def fulfil(self, key: bytes) -> None:
        """Notes that the block of `key` is in the cache."""
        self.computing.pop(key, None)

    def _remove(self, sequence: Sequence) -> None:
        self.pulling.pop(sequence, None)
        match sequence.phase:
            case Phase.WAITING | Phase.RESERVING:
                self.waiting.remove(sequence)
            case Phase.RUNNING:
                self.running.remove(sequence)
            case _:
                del self.aside[sequence.id]
