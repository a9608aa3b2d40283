"""Sampling on the GPU without waiting for it: the choices of `sampling.py`, by the kernels in `sampling_kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from components.engine.draw_settings import COLUMNS, DrawSettings
from components.engine.row_floor import make_row_floor
from components.engine.runner import SampleRow
from components.engine.sampling_kernels import DrawSpace, draw
from components.engine.staging import Staging
from components.messages import TokenLogprobs


class GpuSampler:
    """Draws tokens, step after step, and keeps what one step's settings have in common with the next one's."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """Compiles the kernel that finds floors, where the device can run it."""
        self._row_floor = make_row_floor(device)
        self._staging = Staging(COLUMNS * max_rows, torch.int64, device)
        self._space = DrawSpace.make(max_rows, vocab_size, device)
        self._settings = DrawSettings((), vocab_size)
        self._vocab_size = vocab_size

    def draw(self, logits: torch.Tensor, rows: Sequence[SampleRow], tokens: torch.Tensor) -> None:
        """Draws the tokens of the rows that are not greedy into `tokens`, (rows,) of int64: the largest logits' before.

        `logits` (rows, vocabulary) of bfloat16 or float32.
        """
        samplings = [row.sampling for row in rows]
        if samplings != self._settings.samplings:
            self._settings = DrawSettings(samplings, self._vocab_size)
        if len(self._settings):
            sent = self._staging.send(self._settings.at(rows).reshape(-1)).view(-1, COLUMNS)
            draw(logits, sent, tokens, self._space, self._row_floor, is_cut=self._settings.is_cut)


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
