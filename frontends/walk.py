"""What is told to whoever asks: the walk of a request, and how a router would place one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from components.messages import Explanation, Timing, WorkerCost
from frontends.choice import Choice

_STEPS = ("queue", "prefill", "transfer_wait", "transfer_post", "transfer_wire", "first_token", "decode")


def told_walk(choices: Sequence[Choice], *, processor: str, tokenize_ms: float) -> dict[str, Any]:
    """The first choice's walk, with all choices' walks under `choices` if there are several."""
    walk = _walk_of(choices[0], processor, tokenize_ms)
    if len(choices) > 1:
        walk["choices"] = [{"index": c.plan.index, **_walk_of(c, processor, tokenize_ms)} for c in choices]
    return walk


def told_explanation(explanation: Explanation, num_tokens: int) -> dict[str, Any]:
    """The reply to /router/explain. `choice` is null while the request would have to wait, or nobody can serve it."""
    unit, placement = explanation.hash_unit, explanation.placement
    choice = None
    if placement is not None:
        choice = {
            "worker": placement.worker,
            "prefill_worker": placement.prefill,
            "overlap_blocks": placement.overlap_blocks,
            "prefill_overlap_blocks": placement.prefill_overlap_blocks,
            "reason": placement.reason,
        }
    return {
        "policy": explanation.policy,
        "prompt_tokens": num_tokens,
        "prompt_blocks": num_tokens // unit if unit else 0,
        "tokens_per_block": unit,
        "choice": choice,
        "workers": [_cost_of(worker) for worker in explanation.workers],
    }


def _cost_of(worker: WorkerCost) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.structs.asdict(worker)
    told["load"] = msgspec.structs.asdict(worker.load)
    told["cost"] = round(worker.cost, 1)
    told["terms"] = {name: round(value, 1) for name, value in worker.terms.items()}
    return told


def _walk_of(choice: Choice, processor: str, tokenize_ms: float) -> dict[str, Any]:
    """A choice that a stop string ended has no word of its worker: `mode` and the worker's steps are missing then."""
    known = choice.walk
    timing = known.timing
    ms = {"tokenize": tokenize_ms, "place": known.place_ms, "time_to_first_token": known.first_token_ms}
    told: dict[str, Any] = {
        "processor": processor,
        "worker": known.worker,
        "prefill_worker": timing.prefill_worker if timing else known.prefill,
        "mode": timing.mode if timing else None,
        "reason": timing.reason if timing else None,
        "placement_reason": known.reason,
        "attempts": known.attempts,
        "cached_tokens": choice.cached_tokens or 0,
        "predicted_tokens": known.predicted_tokens,
        "overlap_blocks": known.overlap_blocks,
    }
    if timing is not None:
        told |= _moved(timing)
        ms |= {f"worker_{step}": getattr(timing, f"{step}_ms") for step in _STEPS}
        told["timeline"] = timing.timeline
    told["ms"] = {step: round(value, 3) for step, value in ms.items()}
    return told


def _moved(timing: Timing) -> dict[str, int]:
    return {
        "overlap_blocks": timing.overlap_blocks,
        "blocks_moved": timing.blocks_moved,
        "bytes_moved": timing.bytes_moved,
        "descriptors": timing.descriptors,
    }
