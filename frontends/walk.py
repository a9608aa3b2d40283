"""The reply's `headrace` object: the walk of a request, told to whoever asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.messages import Timing
from frontends.choice import Choice

_STEPS = ("queue", "prefill", "transfer_wait", "transfer_post", "transfer_wire", "first_token", "decode")


def told_walk(choices: Sequence[Choice], *, processor: str, tokenize_ms: float) -> dict[str, Any]:
    """The first choice's walk, with all choices' walks under `choices` if there are several."""
    walk = _walk_of(choices[0], processor, tokenize_ms)
    if len(choices) > 1:
        walk["choices"] = [{"index": c.plan.index, **_walk_of(c, processor, tokenize_ms)} for c in choices]
    return walk


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
