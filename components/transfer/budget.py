"""A bounded budget shared first come, first served: tokens in flight, or blocks pinned for one peer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class Budget:
    """Shares of `capacity`. Who asks waits in line; more than the capacity is cut to it, so everyone's turn comes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: dict[str, int] = {}
        self._waiting: OrderedDict[str, tuple[int, Callable[[], None]]] = OrderedDict()

    @property
    def used(self) -> int:
        """What is given out."""
        return sum(self._held.values())

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds or waits for a share."""
        return not self._held and not self._waiting

    def take(self, key: str, amount: int, on_grant: Callable[[], None]) -> None:
        """Calls `on_grant` once `amount` is free and all earlier ones have theirs; maybe at once."""
        assert key not in self._held, f"{key} has a share already"
        assert key not in self._waiting, f"{key} awaits a share already"
        self._waiting[key] = min(amount, self.capacity), on_grant
        self._grant()

    def give(self, key: str) -> None:
        """Returns the share of `key`, or leaves the line. Idempotent."""
        self._waiting.pop(key, None)
        self._held.pop(key, None)
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            key, (amount, on_grant) = next(iter(self._waiting.items()))
            if self.used + amount > self.capacity:
                return
            del self._waiting[key]
            self._held[key] = amount
            on_grant()
