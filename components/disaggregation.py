"""Remote or local prefill: the decision of a decode worker for one prompt, and what it rests on. Pure.

A prompt goes to a prefill worker unless little of it is missing here, or unless that worker's queue is
so long that waiting for its turn alone takes longer than computing the prompt here.
"""

from __future__ import annotations

import msgspec

from components.engine.outputs import StepStats

PACE_SHARE = 0.3
"""Weight of the newest step in a worker's pace."""

MIN_PACE_TOKENS = 16
"""Steps with fewer prompt tokens say little about how fast prompts are computed."""


class Choice(msgspec.Struct, frozen=True):
    """Where a prompt is computed; `word` is one of few, for metrics, `reason` a sentence, for the timing."""

    is_remote: bool
    word: str
    reason: str


class Queue(msgspec.Struct, frozen=True):
    """Prompt tokens that come before a new prompt, and how many of them are computed in a second; 0: unknown."""

    tokens: int
    tokens_per_s: float

    def seconds(self, more_tokens: int = 0) -> float | None:
        """How long the queue takes, `more_tokens` at its end included; None while the pace is unknown."""
        return (self.tokens + more_tokens) / self.tokens_per_s if self.tokens_per_s > 0 else None


class Pace:
    """How many prompt tokens a second a worker computes: a moving average over its steps."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def note(self, step: StepStats | None) -> None:
        """Takes in one step. Those that only decode are passed over: they wait for memory, not for arithmetic."""
        if step is None or step.num_tokens - step.num_sequences < MIN_PACE_TOKENS or step.duration_s <= 0:
            return
        pace = step.num_tokens / step.duration_s
        last = self.tokens_per_s or pace
        self.tokens_per_s = last + PACE_SHARE * (pace - last)


def choose(uncached_tokens: int, *, max_local: int, here: Queue, there: Queue | None) -> Choice:
    """Decides for a prompt of which `uncached_tokens` are missing here; `there` None: the wait is not looked at.

    A worker that has not computed a prompt yet is taken to be as fast as the other one.
    """
    if uncached_tokens <= max_local:
        return short_prompt(max_local)
    if there is not None:
        pace = here.tokens_per_s or there.tokens_per_s
        wait_s, local_s = there.seconds(), Queue(here.tokens, pace).seconds(uncached_tokens)
        if wait_s is not None and local_s is not None and wait_s > local_s:
            reason = f"the prefill queue takes {wait_s * 1e3:.0f} ms, computing the prompt here {local_s * 1e3:.0f} ms"
            return Choice(False, "prefill_queue", reason)
    return Choice(True, "remote", f"{uncached_tokens} uncached tokens")


def short_prompt(max_local: int) -> Choice:
    """For a prompt of which so little is missing that moving it is not worth while."""
    return Choice(False, "short_prompt", f"at most {max_local} uncached tokens")
