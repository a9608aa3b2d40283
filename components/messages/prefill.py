"""Decode to prefill: compute a prompt, keep its blocks. Prefill to decode: what is ready."""

from __future__ import annotations

from components.messages.generate import Sampling, Stopping, TokenLogprobs
from components.messages.layout import KVHandshake
from graph import Message


class PrefillRequest(Message, frozen=True, array_like=True, tag=True):
    """Decode to prefill: compute the KV of `tokens` from token `skip_tokens` on, and choose the first token.

    `skip_tokens` is a multiple of the decode side's block size: those the decode worker has already.
    """

    id: str
    tokens: bytes
    num_prompt_tokens: int
    skip_tokens: int
    sampling: Sampling
    stopping: Stopping
    lease_ms: int
    disagg_request_id: int = 0
    cache_salt: str | None = None
    priority: int = 0


class PrefillProgress(Message, frozen=True, array_like=True, tag=True):
    """Prefill to decode after every chunk, cumulative: the KV of tokens [0, num_tokens) is final.

    `block_ids` are the prefill worker's blocks (int32) that hold tokens [first_token, ...): the block
    containing `skip_tokens` and all later ones that are ready. A lost message costs nothing.
    """

    block_ids: bytes
    first_token: int  # position of the first token of the first of `block_ids`
    num_tokens: int
    cached_tokens: int  # prompt tokens the prefill worker had in its own cache
    at_ms: float  # monotonic, for the timeline only


class PrefillDone(Message, frozen=True, array_like=True, tag=True):
    """The last reply: all of the prompt's KV is final, and here is the first token."""

    progress: PrefillProgress
    token: int
    logprobs: TokenLogprobs | None
    queue_ms: float
    prefill_ms: float


class PrefillPoll(Message, frozen=True, array_like=True, tag=True):
    """Decode to prefill after silence; answered by the latest PrefillProgress or PrefillDone."""

    id: str


class FollowPrefillQueue(Message, frozen=True, array_like=True, tag=True):
    """Decode to prefill: tell me how long your queue is, now and whenever it changes, until I hang up."""


class PrefillQueue(Message, frozen=True, array_like=True, tag=True):
    """How many prompt tokens come before a new prompt, and how many are computed in a second (0: not known yet)."""

    tokens: int
    tokens_per_s: float


class LeaseRenew(Message, frozen=True, array_like=True, tag=True):
    """Decode to prefill: keep the blocks of `id` pinned for `lease_ms` from now."""

    id: str
    lease_ms: int


class LeaseRelease(Message, frozen=True, array_like=True, tag=True):
    """Decode to prefill on every exit: I shall not read the blocks of `id` any more. Idempotent."""

    id: str


class LeaseState(Message, frozen=True, array_like=True, tag=True):
    """Answer to renew and release: whether the lease of `id` was still held."""

    id: str
    held: bool


PREFILL_REQUESTS = (PrefillRequest, PrefillPoll, FollowPrefillQueue, LeaseRenew, LeaseRelease, KVHandshake)
PREFILL_REPLIES = (PrefillProgress, PrefillDone, PrefillQueue, LeaseState, KVHandshake)
