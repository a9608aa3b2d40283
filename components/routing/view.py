"""What a policy sees of one worker."""

from __future__ import annotations

import msgspec

from components.messages import Load, Role


class WorkerView(msgspec.Struct, frozen=True):
    """What a policy sees of one worker.

    `requests`, `queued_tokens` and `fill` join what the worker reported and what this router placed
    since, each request once: reports lag, and a new router does not know its predecessor's placements.
    """

    id: str
    boot: str
    role: Role
    load: Load = Load()
    placed: int = 0  # live placements of this router
    pending_tokens: int = 0  # prompt tokens placed just now, perhaps not in `load` yet
    requests: int = 0  # that run or wait there
    queued_tokens: int = 0  # prompt tokens to compute before anything placed now
    fill: float = 0.0  # the part of its pool that holds blocks, of live sequences or cached
    standing: float = 0.0  # what any request costs here, and
    rate: float = 0.0  # what each token costs that it lacks; see `components.routing.cost`
