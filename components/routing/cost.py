"""What a request costs on a worker: the policy `kv`. Pure functions over what is known of the worker.

    cost = missing * m  +  queued * q  +  requests * r  +  displaced * d * m

    m   prompt tokens that will not be in the worker's cache when it gets to the request
    q   prompt tokens that it has to compute before that
    r   requests that run or wait there
    d   how full its pool is, from 0 to 1: what is stored in a full one displaces something else

The unit is one prompt token to compute. In-flight placements count in all of them at once: in `m` because the
blocks they will bring are expected, in `q` because those are still to be computed, in `r` because they are placed.
A session stays with its worker because `m` is smallest there, and for no other reason. Where nothing overlaps, `m` is
the same everywhere and the load decides. For one worker the cost is a line in `m`; its two numbers are made when
something about the worker changes, so that a decision is a multiplication and an addition for each.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from components.messages import Role
from components.routing.view import WorkerView


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """How much each part of the cost counts at one stage."""

    missing: float
    queued: float
    requests: float
    displaced: float


WEIGHTS: Mapping[Role, Weights] = {
    # A token to compute counts twice what a token in the queue does: the queue delays this request alone, new work
    # delays all that come after it as well. So equal prompts wait for each other rather than being computed twice.
    # A request costs its decode steps: 200 lets about 15 requests gather on a cached prompt of 1,500 tokens before
    # computing it once more elsewhere is better.
    "worker": Weights(missing=2.0, queued=1.0, requests=200.0, displaced=0.25),
    # A prefill worker's requests are over with their prompt; the queue tells its load. The small rest orders
    # prompts that are shorter than a block.
    "prefill": Weights(missing=2.0, queued=1.0, requests=1.0, displaced=0.25),
    # A decode worker fetches what it lacks, which is far cheaper than computing it: its batch is what counts.
    "decode": Weights(missing=0.25, queued=0.1, requests=64.0, displaced=0.1),
}


class Terms(msgspec.Struct, frozen=True):
    """The parts of a cost, in tokens; their sum is the cost."""

    missing: float
    queued: float
    requests: float
    displaced: float


def standing(role: Role, queued_tokens: int, requests: int) -> float:
    """What any request costs on a worker, whatever its prompt."""
    weights = WEIGHTS[role]
    return weights.queued * queued_tokens + weights.requests * requests


def rate(role: Role, fill: float) -> float:
    """What each missing token costs on a worker."""
    weights = WEIGHTS[role]
    return weights.missing + weights.displaced * fill


def cost(worker: WorkerView, missing_tokens: int) -> float:
    """The cost of a request on a worker that lacks `missing_tokens` of its prompt."""
    return worker.standing + worker.rate * missing_tokens


def terms(worker: WorkerView, missing_tokens: int) -> Terms:
    """The same, part by part."""
    weights = WEIGHTS[worker.role]
    return Terms(
        missing=weights.missing * missing_tokens,
        queued=weights.queued * worker.queued_tokens,
        requests=weights.requests * worker.requests,
        displaced=weights.displaced * worker.fill * missing_tokens,
    )
