"""Sequences with scattered blocks, as a scheduler would hand them to a runner step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from components.engine.runner import Batch, SampleRow
from components.messages import Sampling


class PagedSequences:
    """Token ids of some sequences, how many of each are computed, and the blocks they lie in."""

    def __init__(self, prompts: Sequence[Sequence[int]], *, block_size: int, num_blocks: int, seed: int = 0) -> None:
        self.tokens = [list(prompt) for prompt in prompts]
        self.computed = [0] * len(prompts)
        self._block_size = block_size
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self._tables: list[list[int]] = [[] for _ in prompts]

    def batch(self, counts: dict[int, int], sampling: Sampling) -> Batch:
        """The step that computes `counts[i]` more tokens of sequence i, which are taken as computed from now on."""
        size = self._block_size
        ids, positions, slots, samples = [], [], [], []
        for row, (i, count) in enumerate(counts.items()):
            start, stop = self.computed[i], self.computed[i] + count
            while len(self._tables[i]) * size < stop:
                self._tables[i].append(self._free.pop())
            ids += self.tokens[i][start:stop]
            positions += range(start, stop)
            slots += [self._tables[i][p // size] * size + p % size for p in range(start, stop)]
            if stop == len(self.tokens[i]):
                samples.append(SampleRow(row, sampling, stop, _ints([]), _ints([])))
            self.computed[i] = stop
        return Batch(
            input_ids=_ints(ids),
            positions=_ints(positions),
            cu_seqlens_q=_ints(np.cumsum([0, *counts.values()])),
            seq_lens=_ints([self.computed[i] for i in counts]),
            blocks=_ints([block for i in counts for block in self._tables[i]]),
            cu_blocks=_ints(np.cumsum([0, *(len(self._tables[i]) for i in counts)])),
            slot_mapping=np.array(slots, np.int64),
            samples=tuple(samples),
        )


def _ints(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)
