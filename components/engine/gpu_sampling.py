"""Sampling on the GPU without waiting for it: the choices of `sampling.py`, by the kernel in `sampling_kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from components.engine.runner import SampleRow
from components.engine.sampling import is_greedy
from components.engine.sampling_kernels import draw
from components.engine.staging import Staging
from components.messages import TokenLogprobs

_COLUMNS = 7
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def draw_settings(rows: Sequence[SampleRow], vocab_size: int) -> npt.NDArray[np.int64]:
    """What the kernel needs to know of the rows that are not greedy, (drawn, 7); see `sampling_kernels.draw`."""
    drawn = [(i, row.sampling, row.position) for i, row in enumerate(rows) if not is_greedy(row.sampling)]
    settings = np.empty((len(drawn), _COLUMNS), np.int64)
    seeds = np.array([s.seed & ((1 << 64) - 1) for _, s, _ in drawn], np.uint64)
    positions = np.array([position for _, _, position in drawn], np.uint64)
    keys = _mix(_mix(seeds) ^ positions)
    settings[:, 0] = _mix(keys).view(np.int64)
    settings[:, 1] = _mix(keys ^ np.uint64(1)).view(np.int64)
    settings[:, 2] = [s.top_k if 0 < s.top_k < vocab_size else vocab_size for _, s, _ in drawn]
    floats = np.array([(max(s.temperature, 1e-30), s.top_p, s.min_p) for _, s, _ in drawn], np.float64).reshape(-1, 3)
    with np.errstate(divide="ignore"):
        floats[:, 2] = np.log(np.clip(floats[:, 2], 0.0, 1.0))
    settings[:, 3:6] = floats.view(np.int64)
    settings[:, 6] = [i for i, _, _ in drawn]
    return settings


def draw_rows(logits: torch.Tensor, rows: Sequence[SampleRow], tokens: torch.Tensor, staging: Staging) -> None:
    """Draws the tokens of the rows that are not greedy into `tokens`, (rows,) of int64."""
    settings = draw_settings(rows, logits.shape[1])
    if len(settings):
        sent = staging.send(settings.reshape(-1))
        draw(logits, sent.view(-1, _COLUMNS), tokens)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A step of SplitMix64 on each word."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    mixed: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed


class LogprobCopy:
    """Log-probabilities of the rows that asked for them, on their way to the host."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SampleRow], tokens: torch.Tensor) -> None:
        self._num_rows = len(rows)
        self._wanted = [(i, row.sampling.logprobs) for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        if not self._wanted:
            return
        places = torch.tensor([i for i, _ in self._wanted], pin_memory=True).to(logits.device, non_blocking=True)
        raw = torch.log_softmax(logits[places].float(), dim=-1)
        best = raw.topk(min(raw.shape[-1], max(k for _, k in self._wanted)), dim=-1)
        own = raw.gather(1, tokens[places, None])
        self._host = [
            torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
            for part in (own, best.indices, best.values)
        ]

    def result(self) -> tuple[TokenLogprobs | None, ...]:
        """What was asked for, by row; called when the step is over."""
        result: list[TokenLogprobs | None] = [None] * self._num_rows
        if self._wanted:
            own, indices, values = (part.tolist() for part in self._host)
            for place, (i, k) in enumerate(self._wanted):
                result[i] = TokenLogprobs(own[place][0], tuple(indices[place][:k]), tuple(values[place][:k]))
        return tuple(result)
