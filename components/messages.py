"""Every message of the token side. Token ids travel as raw little-endian int32 bytes.

A request's road: PlacementRequest -> Placement, GenerateRequest -> TokenChunk..., and between the
workers PrefillRequest -> PrefillProgress... -> PrefillDone, with KVHandshake, LeaseRenew and
LeaseRelease beside it. Internal ids (`id`) are boot id + attempt number, minted where the leg
starts; `disagg_request_id` is only a label.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec

from graph import Message

BLOCK_HASH_BYTES = 16
"""Length of one block hash; `hashes` fields hold whole multiples of it."""

TOKEN_BYTES = 4
"""Length of one id in `tokens` and `block_ids` fields."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token or block ids as little-endian int32 bytes."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The ids packed by `pack_ids`."""
    packed = array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


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


class PlacementRequest(Message, frozen=True, array_like=True, tag=True):
    """Processor to router. The stream stays open until the request has ended: its life is the placement's."""

    id: str
    hashes: bytes  # chained hashes of the prompt's full hash units
    num_tokens: int
    max_tokens: int
    priority: int = 0
    disagg_request_id: int | None = None  # a client's label, to be unique among live requests
    exclude: tuple[str, ...] = ()  # replicas that just failed this request, by boot (or id, for all their lives)
    is_explained: bool = False  # answered by an `Explanation`; nothing is placed


class PlacementQueued(Message, frozen=True, array_like=True, tag=True):
    """Router to processor, before the placement: every worker is full, the answer comes within `max_wait_s`."""

    max_wait_s: float


class Placement(Message, frozen=True, array_like=True, tag=True):
    """Router to processor: who serves the request, and why."""

    worker: str
    prefill: str | None = None
    disagg_request_id: int = 0
    overlap_blocks: int = 0  # hash units expected in the worker's cache
    prefill_overlap_blocks: int = 0
    reason: str = ""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy a worker is."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0  # by live sequences; blocks that only the prefix cache holds are free
    blocks_total: int = 0
    prefill_tokens: int = 0  # queued or being computed


Role = Literal["worker", "prefill", "decode"]
"""What a worker is for; "worker" does both phases."""


class WorkerCost(msgspec.Struct, frozen=True, array_like=True):
    """What one worker would cost a request, in prompt tokens to compute; see `components.routing.cost`."""

    worker: str
    role: Role
    load: Load
    placed: int  # live placements of this router
    cached_blocks: int  # hash units of the prompt in its cache now
    overlap_blocks: int  # and those it will hold when it gets to the prompt
    is_full: bool
    cost: float
    terms: dict[str, float]


class Explanation(Message, frozen=True, array_like=True, tag=True):
    """Router to processor: how a request would be placed now. `placement` is None while it would have to wait."""

    policy: str
    hash_unit: int
    placement: Placement | None
    workers: tuple[WorkerCost, ...]


class KVLayout(msgspec.Struct, frozen=True, array_like=True):
    """What must be known to read a rank's KV region: [block][kv_head][layer][K, V][token][head_dim].

    `num_kv_heads` counts the whole model's; a rank holds heads [head_start, head_stop).
    """

    model: str  # fingerprint of the weights and configuration
    dtype: str  # "float32", "bfloat16", "float16"
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_start: int
    head_stop: int
    version: int = 1


class RankRegion(msgspec.Struct, frozen=True, array_like=True):
    """One rank's registered KV region. The agent's name is new at every process start."""

    rank: int
    agent: str
    metadata: bytes  # the transport's own description of the agent, opaque
    layout: KVLayout
    base: int  # address of block 0
    num_blocks: int
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    device: int = 0
    probe_block: int | None = None  # no sequence's; holds the pattern of the self-test


class KVHandshake(Message, frozen=True, array_like=True, tag=True):
    """Both ways between decode and prefill, before any transfer: who I am and where my blocks lie."""

    replica: str
    boot: str
    backend: str  # "UCX", "LIBFABRIC", "memory"
    ranks: tuple[RankRegion, ...]


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


class BlocksStored(Message, frozen=True, array_like=True, tag=True):
    """These hash units can be matched now; `parent` is the hash before the first one (empty at the root)."""

    parent: bytes
    hashes: bytes


class BlocksRemoved(Message, frozen=True, array_like=True, tag=True):
    """These hash units are gone."""

    hashes: bytes


class BlocksCleared(Message, frozen=True, array_like=True, tag=True):
    """The whole prefix cache is gone."""


class LoadChanged(Message, frozen=True, array_like=True, tag=True):
    """The worker's load now."""

    load: Load


class WorkerSnapshot(Message, frozen=True, array_like=True, tag=True):
    """All of a worker that events tell: replaces whatever was known of it."""

    role: Role
    hash_unit: int  # tokens per hash
    load: Load
    hashes: bytes = b""
    parents: bytes = b""  # the hash before each of `hashes`


PREFILL_REQUESTS = (PrefillRequest, PrefillPoll, FollowPrefillQueue, LeaseRenew, LeaseRelease, KVHandshake)
PREFILL_REPLIES = (PrefillProgress, PrefillDone, PrefillQueue, LeaseState, KVHandshake)
WorkerEvents = (BlocksStored, BlocksRemoved, BlocksCleared, LoadChanged)
