"""How many prompt tokens a step may compute beside decodes, so that it stays within a budget of time.

A step with decodes in it is somebody's inter-token latency. The chunk that is allowed follows what the last telling
steps took: up by at most twice where there was room, down by at most half where there was none.
"""

from __future__ import annotations

from collections.abc import Sequence

from components.engine.scheduler import Limits, Work

_LEAST_TOKENS = 32
_FIRST_TOKENS = 256  # before anything is known
_MOST_AT_ONCE = 2.0  # a single odd step changes what is known by no more
_TELLING_SHARE = 0.5  # of the chunk: what fewer tokens took says little about it
_DECODES_SHARE = 1.5  # a step may take so many times what decodes alone take, whatever the budget: prompts get on
_WEIGHT = 0.25  # of a new observation of decodes alone


class ChunkBudget:
    """Bounds the prompts' part of steps. Without a budget it bounds nothing."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, budget_s: float | None) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._budget_s = budget_s
        self._chunk = float(_FIRST_TOKENS)
        self._decode_s = 0.0  # what decodes alone take

    @property
    def limits(self) -> Limits:
        """What the next step may hold."""
        chunk = self._max_tokens if self._budget_s is None else min(self._max_tokens, int(self._chunk))
        return Limits(self._max_num_seqs, self._max_tokens, chunk)

    def landed(self, work: Sequence[Work], duration_s: float) -> None:
        """Learns from a step that went well."""
        if self._budget_s is None:
            return
        sizes = [part.num_tokens for part in work]
        num_decodes = sizes.count(1)
        num_prompt_tokens = sum(sizes) - num_decodes
        if not num_decodes:
            return
        if not num_prompt_tokens:
            known = self._decode_s or duration_s
            self._decode_s = known + _WEIGHT * (min(duration_s, _MOST_AT_ONCE * known) - known)
            return
        self._decode_s = min(self._decode_s, duration_s)
        if num_prompt_tokens >= _TELLING_SHARE * min(self._chunk, self._max_tokens):
            room = max(self._budget_s, _DECODES_SHARE * self._decode_s) / max(duration_s, 1e-9)
            wanted = num_prompt_tokens * min(max(room, 1 / _MOST_AT_ONCE), _MOST_AT_ONCE)
            chunk = max(self._chunk, wanted) if room > 1 else min(self._chunk, wanted)
            self._chunk = min(max(chunk, _LEAST_TOKENS), self._max_tokens)
