"""Every message of the token side. Token ids travel as raw little-endian int32 bytes.

A request's road: PlacementRequest -> Placement, GenerateRequest -> TokenChunk..., and between the
workers PrefillRequest -> PrefillProgress... -> PrefillDone, with KVHandshake, LeaseRenew and
LeaseRelease beside it. Internal ids (`id`) are boot id + attempt number, minted where the leg
starts; `disagg_request_id` is only a label.
"""

from components.messages.events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Load,
    LoadChanged,
    Role,
    WorkerEvents,
    WorkerSnapshot,
)
from components.messages.generate import (
    MAX_LENGTH,
    FinishReason,
    GenerateRequest,
    Sampling,
    Stopping,
    Timing,
    TokenChunk,
    TokenLogprobs,
)
from components.messages.ids import BLOCK_HASH_BYTES, TOKEN_BYTES, pack_ids, unpack_ids
from components.messages.layout import KVHandshake, KVLayout, RankRegion
from components.messages.placement import Explanation, Placement, PlacementQueued, PlacementRequest, WorkerCost
from components.messages.prefill import (
    PREFILL_REPLIES,
    PREFILL_REQUESTS,
    FollowPrefillQueue,
    LeaseRelease,
    LeaseRenew,
    LeaseState,
    PrefillDone,
    PrefillPoll,
    PrefillProgress,
    PrefillQueue,
    PrefillRequest,
)

__all__ = [
    "BLOCK_HASH_BYTES",
    "MAX_LENGTH",
    "PREFILL_REPLIES",
    "PREFILL_REQUESTS",
    "TOKEN_BYTES",
    "BlocksCleared",
    "BlocksRemoved",
    "BlocksStored",
    "Explanation",
    "FinishReason",
    "FollowPrefillQueue",
    "GenerateRequest",
    "KVHandshake",
    "KVLayout",
    "LeaseRelease",
    "LeaseRenew",
    "LeaseState",
    "Load",
    "LoadChanged",
    "Placement",
    "PlacementQueued",
    "PlacementRequest",
    "PrefillDone",
    "PrefillPoll",
    "PrefillProgress",
    "PrefillQueue",
    "PrefillRequest",
    "RankRegion",
    "Role",
    "Sampling",
    "Stopping",
    "Timing",
    "TokenChunk",
    "TokenLogprobs",
    "WorkerCost",
    "WorkerEvents",
    "WorkerSnapshot",
    "pack_ids",
    "unpack_ids",
]
