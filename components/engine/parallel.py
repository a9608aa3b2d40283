"""Rank 0's runner of a tensor-parallel replica: every step is told to the other ranks, then run here as well."""

from __future__ import annotations

from typing import Protocol

import msgspec

from components.engine.runner import Batch, Done, KVRegion, Launched, Runner, Sampled
from components.messages import KVLayout


class Place(msgspec.Struct, frozen=True):
    """One process's place among the ranks of a replica; `store` is the file by which they find each other."""

    rank: int
    size: int
    store: str


class Others(Protocol):
    """Ranks 1 and up of this replica."""

    @property
    def place(self) -> Place:
        """Rank 0's own place beside them."""

    def run(self, batch: Batch) -> None:
        """Lets them run a step; returns at once. Any thread may call it."""


class ParallelRunner:
    """Executes steps on all ranks. Tokens are chosen here alone, so the others get no `samples`."""

    def __init__(self, runner: Runner, others: Others) -> None:
        self._runner = runner
        self._others = others

    @property
    def layout(self) -> KVLayout:
        """Layout of rank 0's blocks."""
        return self._runner.layout

    @property
    def num_blocks(self) -> int:
        """Blocks in every rank's pool."""
        return self._runner.num_blocks

    @property
    def max_model_len(self) -> int:
        """Longest sequence the model takes."""
        return self._runner.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._runner.vocab_size

    @property
    def region(self) -> KVRegion:
        """Where rank 0's blocks lie."""
        return self._runner.region

    is_overlapping = False

    def launch(self, batch: Batch) -> Launched:
        """Runs the step at once."""
        return Done(self.execute(batch))

    def execute(self, batch: Batch) -> Sampled:
        """Runs one step everywhere; the collectives inside keep the ranks together."""
        self._others.run(batch)
        return self._runner.execute(batch)

    def close(self) -> None:
        """Frees rank 0's part; the replica ends the others."""
        self._runner.close()
