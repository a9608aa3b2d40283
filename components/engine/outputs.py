"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from typing import Literal, Self

import msgspec

from components.messages import (
    FinishReason,
    GenerateRequest,
    Load,
    PrefillRequest,
    Sampling,
    Stopping,
    TokenLogprobs,
    unpack_ids,
)
from graph import LinkError, Message

Mode = Literal["generate", "prefill", "remote"]


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to compute; the fields are those of `GenerateRequest` and `PrefillRequest`."""

    id: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    stopping: Stopping
    mode: Mode = "generate"
    cache_salt: str | None = None
    priority: int = 0

    @classmethod
    def of(cls, request: GenerateRequest | PrefillRequest, *, mode: Mode) -> Self:
        """The sequence that a request asks for."""
        return cls(
            id=request.id,
            tokens=unpack_ids(request.tokens),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=request.sampling,
            stopping=request.stopping,
            mode=mode,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )


class StepTokens(msgspec.Struct, frozen=True, gc=False):
    """New tokens of a sequence; `finish` ends it. `cached_tokens` stands in the first one."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    queue_ms: float | None = None  # in the first one: how long it waited before its first step


class ChunkComputed(msgspec.Struct, frozen=True):
    """Mode "prefill": KV of tokens [0, num_tokens) is final in `block_ids` (from token 0).

    The last one has the first token. `queue_ms` is how long it waited before its first step.
    """

    id: str
    block_ids: tuple[int, ...]
    num_tokens: int
    cached_tokens: int
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    queue_ms: float = 0.0


class Matched(msgspec.Struct, frozen=True):
    """Mode "remote": the prompt's first `cached_tokens` are here and pinned; decide what to do with the rest."""

    id: str
    cached_tokens: int


class Reserved(msgspec.Struct, frozen=True):
    """Mode "remote": blocks for all prompt tokens from `first_token` on; they are lent to the transfer now."""

    id: str
    block_ids: tuple[int, ...]
    first_token: int


class Ended(msgspec.Struct, frozen=True):
    """The sequence ended without finishing: cancelled, refused, or failed."""

    id: str
    error: LinkError


Output = StepTokens | ChunkComputed | Matched | Reserved | Ended


def is_urgent(output: Output) -> bool:
    """Whether a request's first token waits for this, or is it."""
    match output:
        case StepTokens():
            return output.cached_tokens is not None
        case ChunkComputed():
            return output.token is not None
        case _:
            return not isinstance(output, Ended)


class StepStats(msgspec.Struct, frozen=True):
    """What one executed step did; the counters count from the engine's start."""

    duration_s: float
    num_sequences: int
    num_tokens: int  # computed in this step
    cached_blocks: int  # in the prefix cache now
    preemptions: int
    prompt_tokens: int  # of all requests taken so far
    cached_tokens: int  # prompt tokens found in the prefix cache so far
    generated_tokens: int


class StepReport(msgspec.Struct, frozen=True):
    """All that one step, or one round of commands, brought: handed over in one piece."""

    outputs: tuple[Output, ...]
    events: tuple[Message, ...]  # BlocksStored, BlocksRemoved, BlocksCleared
    load: Load
    quarantined_blocks: int = 0
    stats: StepStats | None = None  # of the step, if one was executed
