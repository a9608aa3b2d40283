"""One remote prefill, seen from the decode side: pure, it takes events and answers with actions.

    credit      waits for a share of the transfer buffer
    asked       the prefill worker has the request; nothing is announced yet
    reserving   blocks were announced; the engine is to find room for the whole rest at once
    pulling     READs ready blocks, one READ in flight at most, chunk after chunk
    adopted     all bytes are here and the lease held: the engine goes on by itself
    local       given up: the engine recomputes, once
    finished    the first token was also the last: no KV is needed
    cancelled   the request ended

The last four are ends. On each of them prefill is told to release, and what the engine lent to
the transfer (in every end but `adopted`) is settled as soon as no READ is in flight any more.
The lease is counted from when the request or the renewal was sent, never by the peer's clock.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from components.messages import TOKEN_BYTES, FinishReason, PrefillDone, PrefillProgress, unpack_ids
from components.transfer.actions import (
    Action,
    Adopt,
    Ask,
    Finish,
    Poll,
    Read,
    Recompute,
    Release,
    Renew,
    Reserve,
    Settle,
)

TIMED_OUT = "the transfer exceeded kv_transfer_timeout_ms"


class Phase(Enum):
    """Where a remote prefill stands."""

    CREDIT = "credit"
    ASKED = "asked"
    RESERVING = "reserving"
    PULLING = "pulling"
    ADOPTED = "adopted"
    LOCAL = "local"
    FINISHED = "finished"
    CANCELLED = "cancelled"


ENDS = frozenset({Phase.ADOPTED, Phase.LOCAL, Phase.FINISHED, Phase.CANCELLED})


class PullRules(msgspec.Struct, frozen=True):
    """Times and choices that hold for all pulls of a worker."""

    lease_s: float
    timeout_s: float  # longest a READ may take
    silence_s: float = 2.0  # then prefill is asked where it stands
    overlap: bool = True  # READ while later chunks are computed


class Prompt(msgspec.Struct, frozen=True):
    """What is to be pulled: tokens [cached, num_tokens), into blocks of `block_size`."""

    num_tokens: int
    cached_tokens: int
    block_size: int
    max_new_tokens: int  # output tokens that may still come
    may_stop: bool = True  # whether a stop token may be chosen first already
    stop_token_ids: tuple[int, ...] = ()

    def finish_of(self, token: int) -> FinishReason | None:
        """Why `token`, as the first one, ends the sequence, if it does."""
        if self.may_stop and token in self.stop_token_ids:
            return "stop"
        return "length" if self.max_new_tokens <= 1 else None


class Pull:
    """The state of one remote prefill. Every method takes an event and returns what to do, in order."""

    def __init__(self, prompt: Prompt, rules: PullRules) -> None:
        self.prompt = prompt
        self.rules = rules
        self.phase = Phase.CREDIT
        self.have = prompt.cached_tokens  # tokens whose KV is here
        self.progress: PrefillProgress | None = None
        self.done: PrefillDone | None = None
        self.is_reading = False
        self._is_lent = False  # the engine may have lent blocks to this transfer
        self._read_by: float | None = None
        self._lease_until = 0.0
        self._renewed = 0.0  # when the last renewal (or the request) was sent
        self._is_renewing = False
        self._is_polling = False
        self._heard = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the pull has come to one of its ends; a READ may still be in flight."""
        return self.phase in ENDS

    @property
    def num_uncomputed(self) -> int:
        """Tokens that prefill has still to compute, as far as it has told."""
        return self.prompt.num_tokens - (self.progress.num_tokens if self.progress else self.prompt.cached_tokens)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.is_over and not self.is_reading

    def granted(self, now: float) -> list[Action]:
        """The transfer buffer has room."""
        if self.phase is not Phase.CREDIT:
            return []
        self.phase = Phase.ASKED
        self._heard = self._renewed = now
        self._lease_until = now + self.rules.lease_s
        return [Ask()]

    def progressed(self, progress: PrefillProgress, now: float) -> list[Action]:
        """Prefill announced blocks, or answered a poll."""
        if self.is_over or self.phase is Phase.CREDIT:
            return []
        self._heard = now
        if progress.num_tokens > (self.progress.num_tokens if self.progress else 0):
            fault = self._fault_in(progress)
            if fault:
                return self._give_up(fault)
            self.progress = progress
        if self.progress is None:
            return []
        actions: list[Action] = []
        if self.phase is Phase.ASKED and self.prompt.max_new_tokens > 1:
            self.phase = Phase.RESERVING
            self._is_lent = True
            actions.append(Reserve())
        return actions + self._renew_if_due(now) + self._advance(now)

    def completed(self, done: PrefillDone, now: float) -> list[Action]:
        """Prefill is through, and here is the first token."""
        if self.is_over or self.phase is Phase.CREDIT or self.done is not None:
            return []
        self.done = done
        reason = self.prompt.finish_of(done.token)
        if reason is not None:
            return self._end(Phase.FINISHED, Finish(done.token, done.logprobs, reason))
        if done.progress.num_tokens < self.prompt.num_tokens:
            return self._give_up("prefill ended before the whole prompt was computed")
        return self.progressed(done.progress, now)

    def reserved(self, now: float) -> list[Action]:
        """The engine has room for the whole rest."""
        if self.phase is not Phase.RESERVING:
            return []
        self.phase = Phase.PULLING
        return self._advance(now)

    def read_done(self, stop: int, now: float) -> list[Action]:
        """The READ up to `stop` is done."""
        self.is_reading = False
        if self.is_over:
            return self._settle()
        self.have = stop
        return self._advance(now)

    def read_failed(self, reason: str) -> list[Action]:
        """The READ failed; nothing of it will land any more."""
        self.is_reading = False
        return self._settle() if self.is_over else self._give_up(reason)

    def lease_answered(self, held: bool | None, *, sent_at: float, now: float) -> list[Action]:
        """Prefill answered a renewal sent at `sent_at`; None if no answer came."""
        self._is_renewing = False
        if self.is_over or self.phase is Phase.CREDIT:
            return []
        if held is False:
            return self._give_up("the lease on the prefill worker's blocks has ended")
        if held:  # no news of the prompt: only what prefill says of it ends the silence
            self._lease_until = max(self._lease_until, sent_at + self.rules.lease_s)
        elif now >= self._lease_until:
            return self._give_up("the lease on the prefill worker's blocks could not be renewed")
        return self._advance(now)

    def poll_failed(self, reason: str) -> list[Action]:
        """Prefill did not say where it stands."""
        return self.prefill_failed(reason)

    def poll_answered(self) -> None:
        """A poll was answered; its content comes as an event of its own."""
        self._is_polling = False

    def prefill_failed(self, reason: str) -> list[Action]:
        """The prefill worker failed, refused, or died; harmless once it had said all."""
        if self.is_over or (self.done is not None and self.have == self.prompt.num_tokens):
            return []
        return self._give_up(reason)

    def cancelled(self) -> list[Action]:
        """The request ended, by its client or in the engine."""
        return [] if self.is_over else self._end(Phase.CANCELLED)

    def ticked(self, now: float) -> list[Action]:
        """Time passed."""
        if self.is_over or self.phase is Phase.CREDIT:
            return []
        if self._read_by is not None and self.is_reading and now >= self._read_by:
            return self._give_up(TIMED_OUT)
        actions = self._renew_if_due(now)
        if self.done is None and not self._is_polling and now >= self._heard + self.rules.silence_s:
            self._is_polling = True
            actions.append(Poll())
        return actions

    def _advance(self, now: float) -> list[Action]:
        """What can be done with what has been announced."""
        if self.phase is not Phase.PULLING or self.is_reading or self.progress is None:
            return []
        ready = self._ready_tokens()
        if self.have < ready:
            self.is_reading = True
            self._read_by = now + self.rules.timeout_s
            ids = tuple(unpack_ids(self.progress.block_ids))
            return [Read(self.have, ready, ids, self.progress.first_token)]
        if self.done is None or self.have < self.prompt.num_tokens:
            return []
        if now < self._lease_until:
            return self._end(Phase.ADOPTED, Adopt(self.done.token, self.done.logprobs))
        return self._renew(now)

    def _ready_tokens(self) -> int:
        """Tokens that may be READ now: whole blocks, and the rest with the last chunk."""
        assert self.progress is not None
        if self.done is not None:
            return self.prompt.num_tokens
        size = self.prompt.block_size
        return self.progress.num_tokens // size * size if self.rules.overlap else self.have

    def _renew_if_due(self, now: float) -> list[Action]:
        is_due = self.progress is not None and now >= self._renewed + self.rules.lease_s / 3
        return self._renew(now) if is_due else []

    def _renew(self, now: float) -> list[Action]:
        if self._is_renewing:
            return []
        self._is_renewing = True
        self._renewed = now
        return [Renew()]

    def _fault_in(self, progress: PrefillProgress) -> str | None:
        if len(progress.block_ids) % TOKEN_BYTES:
            return f"prefill announced {len(progress.block_ids)} bytes of block ids"
        if progress.num_tokens > self.prompt.num_tokens or not 0 <= progress.first_token <= self.prompt.cached_tokens:
            return (
                f"prefill announced tokens [{progress.first_token}, {progress.num_tokens}) "
                f"of the prompt's [{self.prompt.cached_tokens}, {self.prompt.num_tokens})"
            )
        return None

    def _give_up(self, reason: str) -> list[Action]:
        return self._end(Phase.LOCAL, Recompute(reason))

    def _end(self, phase: Phase, *first: Action) -> list[Action]:
        self.phase = phase
        return [*first, Release(), *([] if self.is_reading else self._settle())]

    def _settle(self) -> list[Action]:
        is_due = self._is_lent and self.phase is not Phase.ADOPTED
        self._is_lent = False
        return [Settle()] if is_due else []
