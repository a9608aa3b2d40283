"""Processor to worker: generate. Worker to processor: tokens."""

from __future__ import annotations

from typing import Literal

import msgspec

from graph import Message

MAX_LENGTH = "max_length"
"""The fact that a worker announces: the tokens of the longest sequence it has room for, prompt and output together."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one sequence's tokens are chosen. The defaults sample from the plain distribution.

    `seed` and the token's position key a counter-based generator, so the choice at a position does
    not depend on the batch, the worker or a restart. The text side always sets `seed` (random if the
    user gave none, and distinct for each of `n` choices). Penalties count output tokens, except
    `repetition_penalty`, which counts prompt tokens as well.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0  # 64 bits, unsigned
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best ones'


class Stopping(msgspec.Struct, frozen=True, array_like=True):
    """When a sequence ends. Text stops are the processor's; it cancels the stream."""

    max_tokens: int  # output tokens in all, those of earlier attempts included
    min_tokens: int = 0  # until then no `stop_token_ids` is chosen
    stop_token_ids: tuple[int, ...] = ()  # end of sequence included, unless ignored; reported, then "stop"


class GenerateRequest(Message, frozen=True, array_like=True, tag=True):
    """Processor to (decode or aggregated) worker: generate for these tokens.

    `tokens` are the prompt and, after a re-placement, the output so far: the first
    `num_prompt_tokens` are the prompt. Output counts, penalties and sampling positions go by that
    boundary. `prefill` is the replica id of the prefill worker the router chose.
    """

    id: str
    tokens: bytes
    num_prompt_tokens: int
    sampling: Sampling
    stopping: Stopping
    prefill: str | None = None
    disagg_request_id: int = 0
    cache_salt: str | None = None
    priority: int = 0  # higher goes first
    timing: bool = False  # the last chunk shall carry a `Timing`


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logarithms of probabilities at one position, after no temperature and no cut (as OpenAI reports)."""

    logprob: float  # of the chosen token
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """The walk of one request, told with its last tokens. Times in ms; `timeline` in ms of one host's steady clock."""

    worker: str
    prefill_worker: str | None = None
    mode: Literal["remote", "local"] = "local"
    reason: str = ""  # why local or remote
    cached_tokens: int = 0
    overlap_blocks: int = 0
    blocks_moved: int = 0
    bytes_moved: int = 0
    descriptors: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_wait_ms: float = 0.0
    transfer_post_ms: float = 0.0
    transfer_wire_ms: float = 0.0
    first_token_ms: float = 0.0
    decode_ms: float = 0.0
    timeline: tuple[tuple[str, float], ...] = ()  # "chunk" on prefill; "read", "read_done", "adopted" here


FinishReason = Literal["stop", "length"]


class TokenChunk(Message, frozen=True, array_like=True, tag=True):
    """Worker to processor: the tokens of one engine step for one sequence.

    `cached_tokens` (prompt tokens nobody computed for this request) stands in the first chunk;
    `finish` and `timing` in the last one. Failures are the stream's `LinkError` instead.
    """

    tokens: bytes
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    timing: Timing | None = None
