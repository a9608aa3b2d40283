"""All that is known of blocks: those the workers told of, and those that live placements will bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.messages import BlocksCleared, BlocksRemoved, BlocksStored, WorkerSnapshot
from components.routing.expected import Expected, Promise
from components.routing.index import BlockIndex, block_keys, chains


class Blocks:
    """The index and the expectations of one router. Workers are named by boot: a next life starts empty."""

    def __init__(self, max_blocks: int) -> None:
        self.index = BlockIndex(max_blocks)
        self.expected = Expected()

    def replace(self, boot: str, snapshot: WorkerSnapshot) -> None:
        """A snapshot came: whatever was known of the worker is void at once."""
        self.forget(boot)
        for parent, keys in chains(snapshot.hashes, snapshot.parents):
            self.index.store(boot, parent, keys)

    def apply(self, boot: str, event: Any) -> tuple[str, ...]:
        """An event came; returns the other workers that have less to do by that."""
        match event:
            case BlocksStored():
                keys, parent = block_keys(event.hashes), block_keys(event.parent)
                self.index.store(boot, parent[0] if parent else None, keys)
                return self.expected.arrived(boot, keys)
            case BlocksRemoved():
                self.index.remove(boot, block_keys(event.hashes))
            case BlocksCleared():
                self.index.forget(boot)
        return ()

    def forget(self, boot: str) -> None:
        """The worker is gone."""
        self.index.forget(boot)
        self.expected.forget(boot)

    def cached(self, keys: Sequence[int]) -> dict[str, int]:
        """How many of a prompt's first blocks each worker holds now."""
        return self.index.overlaps(keys)

    def overlaps(self, keys: Sequence[int]) -> dict[str, int]:
        """How many of a prompt's first blocks each worker will hold when it gets to it."""
        return self.expected.extend(self.index.overlaps(keys), keys)

    def place(self, key: str, stages: Sequence[tuple[str, int]], keys: Sequence[int], now_s: float) -> None:
        """A prompt goes to these workers, the generating one first, each with its overlap.

        Where that one lacks a block at most, nobody computes anything beside it.
        """
        generating, overlap = stages[0]
        promises = [Promise(generating, keys[overlap:])]
        if len(keys) - overlap > 1:
            promises += [Promise(boot, keys[depth:]) for boot, depth in stages[1:]]
        self.expected.expect(key, promises, now_s)
