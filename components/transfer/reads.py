"""A READ as those see it who start one: its parts, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from components.transfer.plan import Pieces

Part = tuple[str, Pieces]
"""What one rank READs from one agent; a transfer has one part for each pair of ranks that share heads."""


class ReadResult(msgspec.Struct, frozen=True, array_like=True):
    """How a READ ended: nothing of it will land any more. Times in ms."""

    error: str | None
    descriptors: int
    num_bytes: int
    wait_ms: float
    post_ms: float
    wire_ms: float


OnResult = Callable[[ReadResult], None]
"""Called exactly once, when no byte of the READ can land any more."""

StartRead = Callable[[Sequence[Part], OnResult], None]
"""Starts a READ into one rank's region."""
