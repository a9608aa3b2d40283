"""Processor to router: which workers? And the answer, with its reasons."""

from __future__ import annotations

import msgspec

from components.messages.events import Load, Role
from graph import Message


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
