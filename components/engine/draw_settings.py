"""What the sampling kernels are told of the rows they draw, made anew when the rows' requests change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from components.engine.runner import SampleRow
from components.engine.sampling import is_greedy
from components.messages import Sampling

COLUMNS = 7
_WORD = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class DrawSettings:
    """The settings of one composition of rows, (drawn, 7) of int64, for the rows that are not greedy.

    Columns: the keys of both stages, top_k (the vocabulary's size where unset), the bits of float64
    temperature, top_p and the logarithm of min_p, and the row. Only the keys change from step to step.
    """

    def __init__(self, samplings: Sequence[Sampling], vocab_size: int) -> None:
        self.samplings = samplings
        drawn = [(i, s) for i, s in enumerate(samplings) if not is_greedy(s)]
        top_k = [s.top_k if 0 < s.top_k < vocab_size else vocab_size for _, s in drawn]
        self.is_cut = any(s.top_p < 1 for _, s in drawn) or any(k < vocab_size for k in top_k)
        self._seeds = _mix(np.array([s.seed & _WORD for _, s in drawn], np.uint64))
        self._places = [i for i, _ in drawn]
        self._settings = np.empty((len(drawn), COLUMNS), np.int64)
        floats = np.array([(max(s.temperature, 1e-30), s.top_p, s.min_p) for _, s in drawn], np.float64).reshape(-1, 3)
        with np.errstate(divide="ignore"):
            floats[:, 2] = np.log(np.clip(floats[:, 2], 0.0, 1.0))
        self._settings[:, 2] = top_k
        self._settings[:, 3:6] = floats.view(np.int64)
        self._settings[:, 6] = self._places

    def __len__(self) -> int:
        return len(self._places)

    def at(self, rows: Sequence[SampleRow]) -> npt.NDArray[np.int64]:
        """The settings at the rows' positions, good until the next call."""
        keys = _mix(self._seeds ^ np.array([rows[i].position for i in self._places], np.uint64))
        self._settings[:, :2] = _mix(np.stack((keys, keys ^ np.uint64(1)), axis=1)).view(np.int64)
        return self._settings


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A step of SplitMix64 on each word."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    mixed: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed
