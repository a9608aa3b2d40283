"""What a `Pull` decides; the puller carries it out."""

from __future__ import annotations

import msgspec

from components.messages import FinishReason, TokenLogprobs


class Ask(msgspec.Struct, frozen=True):
    """Send the `PrefillRequest`."""


class Reserve(msgspec.Struct, frozen=True):
    """Let the engine reserve room for all missing blocks."""


class Read(msgspec.Struct, frozen=True):
    """READ the KV of tokens [start, stop) from the announced blocks into the reserved ones."""

    start: int
    stop: int
    source_ids: tuple[int, ...]
    source_first: int


class Renew(msgspec.Struct, frozen=True):
    """Renew the lease; the answer comes back as `lease_answered`."""


class Poll(msgspec.Struct, frozen=True):
    """Ask prefill where it stands."""


class Adopt(msgspec.Struct, frozen=True):
    """All KV is here: let the engine go on after the first token."""

    token: int
    logprobs: TokenLogprobs | None


class Finish(msgspec.Struct, frozen=True):
    """The first token ends the sequence: hand it out, drop the engine's sequence."""

    token: int
    logprobs: TokenLogprobs | None
    reason: FinishReason


class Recompute(msgspec.Struct, frozen=True):
    """Let the engine prefill by itself."""

    reason: str


class Release(msgspec.Struct, frozen=True):
    """Tell prefill that its blocks are not needed any more, and hang up."""


class Settle(msgspec.Struct, frozen=True):
    """No byte will land any more in what the engine lent."""


Action = Ask | Reserve | Read | Renew | Poll | Adopt | Finish | Recompute | Release | Settle
