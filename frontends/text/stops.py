"""Stop strings: finds the first one in a growing text, and says how much of the text's end may become one.

Each stop is followed by a Knuth-Morris-Pratt automaton, a few steps per character whatever the stops' lengths.
The state of an automaton is the length of the longest end of the text that is a beginning of its stop.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class StopFound(msgspec.Struct, frozen=True):
    """A stop string and its first and last-plus-one character in the text fed so far."""

    stop: str
    start: int
    end: int


class StopFinder:
    """Feeds on text piece by piece. The result does not depend on how the text is cut into pieces."""

    def __init__(self, stops: Iterable[str]) -> None:
        # Of stops that end together the longest wins, so it is looked at first.
        self._stops = sorted({s for s in stops if s}, key=lambda s: (-len(s), s))
        self._tables = [_failures(s) for s in self._stops]
        self._states = [0] * len(self._stops)
        self._num_chars = 0

    @property
    def has_stops(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stops)

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that are the beginning of a stop, and so must not be shown yet."""
        return max(self._states, default=0)

    def feed(self, text: str, *, armed: bool = True) -> StopFound | None:
        """Takes more text; the first stop that ends in it, if any, and then no further call may follow.

        Not `armed`, stops that end in this piece are let pass.
        """
        for char in text:
            self._num_chars += 1
            for i, stop in enumerate(self._stops):
                state = _step(stop, self._tables[i], self._states[i], char)
                if state == len(stop):
                    if armed:
                        return StopFound(stop, self._num_chars - len(stop), self._num_chars)
                    state = self._tables[i][state - 1]
                self._states[i] = state
        return None


def _step(stop: str, failures: list[int], state: int, char: str) -> int:
    while state and stop[state] != char:
        state = failures[state - 1]
    return state + 1 if stop[state] == char else 0


def _failures(stop: str) -> list[int]:
    """For each beginning of `stop`, the length of its longest proper end that is also a beginning."""
    table = [0] * len(stop)
    state = 0
    for i in range(1, len(stop)):
        state = _step(stop, table, state, stop[i])
        table[i] = state
    return table
