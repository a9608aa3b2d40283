"""Sampling on the GPU without waiting for it: the choices of `sampling.py`, by the kernels in `sampling_kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from components.engine.draw_settings import COLUMNS, DrawSettings
from components.engine.row_floor import make_row_floor
from components.engine.runner import SampleRow
from components.engine.sampling import adjust, changed_rows
from components.engine.sampling_kernels import DrawSpace, draw
from components.engine.staging import Staging
from components.messages import Sampling, TokenLogprobs

_GREEDY = Sampling(temperature=0.0)


class GpuSampler:
    """Draws tokens, step after step, and keeps what one step's settings have in common with the next one's.

    Rows whose logits a bias, a penalty or a ban changes are drawn by themselves, from a float32 copy; the others are
    drawn from what the model gave, which is faster in bfloat16.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """Compiles the kernel that finds floors, where the device can run it."""
        self._row_floor = make_row_floor(device)
        self._staging = Staging(COLUMNS * (max_rows + 1), torch.int64, device)
        self._space = DrawSpace.make(max_rows, vocab_size, device)
        self._plain = self._changed = DrawSettings((), vocab_size)
        self._vocab_size = vocab_size

    def draw(self, logits: torch.Tensor, rows: Sequence[SampleRow], tokens: torch.Tensor) -> None:
        """Chooses into `tokens`, (rows,) of int64 with the largest logits before, where these are not to stay.

        `logits` (rows, vocabulary) as the model gave them, in bfloat16, float16 or float32.
        """
        changed = changed_rows(rows)
        samplings = [row.sampling for row in rows]
        for i in changed:
            samplings[i] = _GREEDY
        self._plain = self._settings(self._plain, samplings)
        if changed:
            self._draw_apart(logits, rows, tokens, changed)
        elif len(self._plain):
            self._draw(logits, self._send(self._plain.at(rows)), tokens, self._plain)

    def _draw_apart(
        self, logits: torch.Tensor, rows: Sequence[SampleRow], tokens: torch.Tensor, changed: list[int]
    ) -> None:
        """Draws the plain rows from the logits as they are, and chooses the changed ones' tokens from a copy."""
        apart = [rows[i] for i in changed]
        self._changed = self._settings(self._changed, [row.sampling for row in apart])
        count = len(self._plain)
        first = count + count % 2  # at a multiple of 16 bytes, for which Triton compiles kernels of their own
        settings = np.zeros((first + len(self._changed), COLUMNS), np.int64)
        settings[:count], settings[first:] = self._plain.at(rows), self._changed.at(apart)
        sent = self._send(settings)
        self._draw(logits, sent[:count], tokens, self._plain)
        places = torch.tensor(changed, pin_memory=logits.is_cuda).to(logits.device, non_blocking=True)
        adjusted = adjust(logits[places], apart)
        best = adjusted.argmax(dim=-1)
        self._draw(adjusted, sent[first:], best, self._changed)
        tokens.index_copy_(0, places, best)

    def _settings(self, last: DrawSettings, samplings: list[Sampling]) -> DrawSettings:
        return last if samplings == last.samplings else DrawSettings(samplings, self._vocab_size)

    def _send(self, settings: npt.NDArray[np.int64]) -> torch.Tensor:
        """A step's settings on the device; called once a step, see `Staging`."""
        return self._staging.send(settings.reshape(-1)).view(-1, COLUMNS)

    def _draw(self, logits: torch.Tensor, sent: torch.Tensor, tokens: torch.Tensor, settings: DrawSettings) -> None:
        if len(settings):
            draw(logits, sent, tokens, self._space, self._row_floor, is_cut=settings.is_cut)


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
