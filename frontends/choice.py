"""One choice of a reply: what was asked for it, and what has come of it so far.

    open       chunks of tokens come in, text goes out
    finished   `finish` is set: "stop" (end of sequence, stop token or stop string) or "length"

Pure bookkeeping: it neither sends nor waits.
"""

from __future__ import annotations

from collections import deque

import msgspec

from components.messages import Sampling, Stopping, Timing, TokenChunk, TokenLogprobs, unpack_ids
from frontends.text.detokenizer import Detokenizer, TokenText


class Delta(msgspec.Struct, frozen=True):
    """What one chunk added: text, and its tokens with their logprobs if those were asked for."""

    text: str
    tokens: tuple[tuple[TokenText, TokenLogprobs], ...] = ()
    chunk: TokenChunk | None = None  # where it came from


class Plan(msgspec.Struct, frozen=True):
    """What is asked for one choice."""

    index: int
    prompt: int  # number of the prompt in the request
    prompt_ids: bytes
    num_prompt_tokens: int
    sampling: Sampling
    stopping: Stopping
    cache_salt: str | None = None
    priority: int = 0
    disagg_request_id: int = 0
    includes_stop: bool = False
    is_takeover: bool = False  # another processor had this request, and may still hold its label
    wants_timing: bool = False


class Walk(msgspec.Struct):
    """Where a choice was computed, as far as the processor knows."""

    worker: str = ""
    prefill: str | None = None
    overlap_blocks: int = 0
    predicted_tokens: int = 0  # that the router expected to be cached
    reason: str = ""
    place_ms: float = 0.0
    first_token_ms: float = 0.0
    attempts: int = 0
    timing: Timing | None = None


class Choice:
    """The state of one choice across all its attempts."""

    def __init__(self, plan: Plan, detokenizer: Detokenizer) -> None:
        self.plan = plan
        self.output: list[int] = []
        self.finish: str | None = None
        self.cached_tokens: int | None = None
        self.walk = Walk()
        self._detokenizer = detokenizer
        self._logprobs: deque[TokenLogprobs] = deque()

    def take(self, chunk: TokenChunk) -> Delta:
        """Books one chunk; sets `finish` with the last one, or when a stop string is complete."""
        ids = unpack_ids(chunk.tokens)
        self.output += ids
        self._logprobs.extend(chunk.logprobs or ())
        if self.cached_tokens is None:
            self.cached_tokens = chunk.cached_tokens
        if chunk.timing is not None:
            self.walk.timing = chunk.timing
        is_silent = chunk.finish == "stop" and not self.plan.includes_stop
        piece = self._detokenizer.feed(ids, silent_last=is_silent)
        text, tokens = piece.text, piece.tokens
        if not piece.stopped and chunk.finish is not None:
            rest = self._detokenizer.finish()
            text, tokens = text + rest.text, tokens + rest.tokens
            if is_silent and not rest.stopped:
                tokens = tokens[:-1]  # the stop token itself
            self.finish = "stop" if rest.stopped else chunk.finish
        elif piece.stopped:
            self.finish = "stop"
        return Delta(text, self._with_logprobs(tokens), chunk)

    def _with_logprobs(self, tokens: tuple[TokenText, ...]) -> tuple[tuple[TokenText, TokenLogprobs], ...]:
        if self.plan.sampling.logprobs is None:
            return ()
        return tuple((token, self._logprobs.popleft()) for token in tokens if self._logprobs)
