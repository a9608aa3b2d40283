"""The pace: how many prompt tokens a step may compute beside decodes, so that it stays within a budget.

A step with decodes in it is somebody's inter-token latency. What a step takes is learned from those that landed:
decodes alone, and what each prompt token added to them.
"""

from __future__ import annotations

from collections.abc import Sequence

from components.engine.scheduler import Limits, Work

_LEAST_TOKENS = 32  # whatever the budget, so that prompts get on
_FIRST_TOKENS = 256  # before anything is known
_WEIGHT = 0.25  # of a new observation
_GROWTH = 2  # of a chunk over the largest that was seen: what a small one took says little about a large one


class Pace:
    """Bounds the prompts' part of steps. Without a budget it bounds nothing."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, budget_s: float | None) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._budget_s = budget_s
        self._decode_s = 0.0
        self._token_s: float | None = None
        self._largest = _FIRST_TOKENS // _GROWTH

    @property
    def limits(self) -> Limits:
        """What the next step may hold."""
        return Limits(self._max_num_seqs, self._max_tokens, self._max_prompt_tokens)

    @property
    def _max_prompt_tokens(self) -> int:
        if self._budget_s is None:
            return self._max_tokens
        wanted = self._largest * _GROWTH
        if self._token_s is not None:
            left_s = max(0.0, self._budget_s - self._decode_s)
            wanted = min(wanted, int(left_s / self._token_s))
        return min(self._max_tokens, max(_LEAST_TOKENS, wanted))

    def landed(self, work: Sequence[Work], duration_s: float) -> None:
        """Learns from a step."""
        if self._budget_s is None:
            return
        sizes = [part.num_tokens for part in work]
        num_decodes = sizes.count(1)
        num_prompt_tokens = sum(sizes) - num_decodes
        if num_prompt_tokens == 0:
            self._decode_s += _WEIGHT * (duration_s - self._decode_s) if self._decode_s else duration_s
            return
        self._largest = max(self._largest, num_prompt_tokens)
        added_s = max(duration_s - (self._decode_s if num_decodes else 0.0), 1e-9)
        # By its share of the budget: a chunk that fills it says what the next one will take, a few tokens do not.
        known = self._token_s
        weight = min(1.0, max(_WEIGHT, duration_s / self._budget_s)) if known is not None else 1.0
        observed = added_s / num_prompt_tokens
        self._token_s = observed if known is None else known + weight * (observed - known)
