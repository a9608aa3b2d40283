"""Admission: placements that wait because every worker has all the requests it shall have.

Life of a waiting placement:

    waiting    by priority, then arrival, for at most `max_wait_s`
    admitted   a worker has room again
    shed       it waited too long, or the queue is full and it was the last in order
    left       its processor closed the stream
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from components.messages import PlacementRequest
from graph import Overloaded, Stream
from graph.words import counted

SHED = "rate_limit_exceeded"
"""The code of the refusal of a shed request."""

MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0
_NUM_ENDS = 64


class Waiting(msgspec.Struct):
    """One request to place: its stream, its claimed label, the keys of its blocks."""

    request: PlacementRequest
    stream: Stream
    label: int
    keys: Sequence[int]
    deadline_s: float = 0.0
    rank: tuple[int, int] = (0, 0)  # smaller goes first


class AdmissionQueue:
    """Waiting placements in order. At most `max_length`; whoever is last beyond that is shed."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._waiting: list[Waiting] = []
        self._arrivals = 0
        self._ends: deque[float] = deque(maxlen=_NUM_ENDS)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first(self) -> Waiting | None:
        """Who is admitted next."""
        return self._waiting[0] if self._waiting else None

    @property
    def next_deadline_s(self) -> float | None:
        """When the next one has waited too long."""
        return min((waiting.deadline_s for waiting in self._waiting), default=None)

    def push(self, waiting: Waiting) -> Waiting | None:
        """Takes one in; returns whoever has to go for it, perhaps itself."""
        self._arrivals += 1
        waiting.rank = (-waiting.request.priority, self._arrivals)
        insort(self._waiting, waiting, key=attrgetter("rank"))
        return self._waiting.pop() if len(self._waiting) > self._max_length else None

    def pop(self) -> Waiting:
        """Takes out the first one."""
        return self._waiting.pop(0)

    def put_back(self, waiting: Waiting) -> None:
        """The first one still has to wait."""
        self._waiting.insert(0, waiting)

    def remove(self, waiting: Waiting) -> bool:
        """Takes one out whose processor left; False if it does not wait any more."""
        if all(other is not waiting for other in self._waiting):
            return False
        self._waiting = [other for other in self._waiting if other is not waiting]
        return True

    def take_expired(self, now_s: float) -> list[Waiting]:
        """Takes out those that have waited too long."""
        expired = [waiting for waiting in self._waiting if waiting.deadline_s <= now_s]
        if expired:
            self._waiting = [waiting for waiting in self._waiting if waiting.deadline_s > now_s]
        return expired

    def note_end(self, now_s: float) -> None:
        """A placement has ended, which is how fast the queue moves."""
        self._ends.append(now_s)

    def refusal(self, now_s: float) -> Overloaded:
        """What a shed request is told: to come back when the queue may have passed."""
        elapsed_s = now_s - self._ends[0] if self._ends else 0.0
        wait_s = (len(self) + 1) * elapsed_s / len(self._ends) if self._ends else MIN_RETRY_S
        return Overloaded(
            f"no worker has room, with {counted(len(self), 'request')} waiting",
            code=SHED,
            retry_after_s=min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s)),
        )
