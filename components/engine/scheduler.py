"""The scheduler: a pure function from the queues and the pool to the plan of one step.

Decodes come first, then the chunks of prompts under way, then new sequences, each by priority and
arrival. What guarantees that every sequence gets on:

- A new sequence is admitted only with room for all its tokens at once, so only decodes run out of blocks.
- A decode that finds no block preempts the last sequence in order, in the end itself, so the first
  one always gets on as soon as others return what is set aside.
- The first waiting sequence that lacks room stops those behind it, so nothing small starves it.
- Prompts pulled from elsewhere are matched only while all such prompts together fit the pool, and may
  pass a stuck queue when nothing runs, so pinned prefixes never block each other.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from components.engine.queues import Queues
from components.engine.sequence import Phase, Sequence
from components.kv.pool import BlockPool

_MAX_WAITING_LOOKED_AT = 256


class Limits(msgspec.Struct, frozen=True):
    """What one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prompt_tokens: int  # of prompts, where there are decodes: see `chunk_budget.py`


class Work(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, stop) of a sequence to compute, after allocating `num_blocks` more blocks for it.

    Its next token is chosen, `is_sampled`, if they end in its newest one.
    """

    sequence: Sequence
    start: int
    stop: int
    num_blocks: int
    is_sampled: bool

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


class Admission(msgspec.Struct, frozen=True):
    """A waiting sequence that leaves the queue: its matched blocks, and how many more it is given.

    `phase` is where it goes: running, matched, or reserved (then `cached` is empty: pinned already).
    """

    sequence: Sequence
    phase: Phase
    cached: tuple[int, ...] = ()
    num_blocks: int = 0


class Plan(msgspec.Struct, frozen=True):
    """One step: first `preempted` give back their blocks, then `admitted` come in, then `work` is executed."""

    preempted: tuple[Sequence, ...] = ()
    admitted: tuple[Admission, ...] = ()
    work: tuple[Work, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.preempted or self.admitted or self.work)


def schedule(queues: Queues, pool: BlockPool, limits: Limits) -> Plan:
    """What to do in the next step. Changes nothing; valid until the queues or the pool change."""
    draft = _Draft(queues, pool, limits)
    draft.plan_decodes()
    draft.keep_budget()
    draft.plan_chunks()
    if not draft.preempted:
        draft.plan_admissions()
    return Plan(tuple(draft.preempted), tuple(draft.admitted), tuple(draft.work))


class _Draft:
    """A plan in the making, with the room that is left after what it holds so far."""

    def __init__(self, queues: Queues, pool: BlockPool, limits: Limits) -> None:
        self._queues = queues
        self._pool = pool
        self._free = pool.num_free
        self._budget = limits.max_num_batched_tokens
        self._max_prompt_tokens = limits.max_prompt_tokens
        # A step must have room for a token of each running sequence, and each reserved one will run.
        num_reserved = sum(s.phase is Phase.RESERVED for s in queues.pulling)
        self._places = min(limits.max_num_seqs, limits.max_num_batched_tokens) - len(queues.running) - num_reserved
        self._num_pulled = sum(s.num_blocks_for(len(s)) for s in queues.pulling)
        self._dropped: dict[int, int] = {}  # references that preempted sequences give back
        self._pinned: set[int] = set()  # idle blocks that admitted sequences pin
        self._claimed: set[bytes] = set()  # keys that admitted sequences will compute
        self._computing: list[Sequence] = []  # running ones whose prompts are under way
        self.preempted: dict[Sequence, None] = {}
        self.admitted: list[Admission] = []
        self.work: list[Work] = []

    def plan_decodes(self) -> None:
        """A token for each running sequence past its prompt, preempting from the end when blocks run out."""
        for sequence in self._queues.running:
            length = len(sequence.tokens)
            if not sequence.is_decoding:
                self._computing.append(sequence)
            elif length < sequence.max_length and not (self.preempted and sequence in self.preempted):
                missing = sequence.num_blocks_missing(length)
                if not missing or self._make_room(missing, sequence):
                    self._free -= missing
                    self._budget -= 1  # enough for every running sequence: see `_places`
                    self.work.append(Work(sequence, length - 1, length, missing, True))

    def keep_budget(self) -> None:
        """Prompts get no more of a step with decodes than these can wait for."""
        if self.work:
            self._budget = min(self._budget, self._max_prompt_tokens)

    def plan_chunks(self) -> None:
        """Further chunks of prompts under way; their blocks are there already."""
        for sequence in self._computing:
            if sequence not in self.preempted:
                self._add_work(sequence, sequence.num_computed, len(sequence))

    def plan_admissions(self) -> None:
        """Sequences that leave the waiting queue, in order; see the module for who may pass whom."""
        is_stuck = False
        for sequence in islice(self._queues.waiting, _MAX_WAITING_LOOKED_AT):
            if is_stuck and sequence.phase is not Phase.RESERVING:
                continue
            if sequence.phase is Phase.RESERVING:
                has_room = self._plan_reservation(sequence)
            elif sequence.wants_match:
                has_room = self._plan_match(sequence)
            else:
                has_room = self._plan_start(sequence)
            is_stuck = is_stuck or not has_room
            if is_stuck and (self._queues.running or self.admitted):
                return

    def _plan_reservation(self, sequence: Sequence) -> bool:
        if self._places <= 0:
            return True
        missing = sequence.num_blocks_missing(len(sequence))
        if missing + self._headroom > self._free:
            return False
        self._free -= missing
        self._places -= 1
        self.admitted.append(Admission(sequence, Phase.RESERVED, num_blocks=missing))
        return True

    def _plan_match(self, sequence: Sequence) -> bool:
        cached, is_promised = self._cached(sequence)
        if is_promised:
            return True
        total = sequence.num_blocks_for(len(sequence))
        if self._num_pulled + total > self._pool.num_blocks or self._num_newly_pinned(cached) > self._free:
            return False
        self._num_pulled += total
        self._admit(sequence, Phase.MATCHED, cached, num_blocks=0)
        return True

    def _plan_start(self, sequence: Sequence) -> bool:
        if self._places <= 0 or self._budget <= 0:
            return True
        cached, is_promised = self._cached(sequence)
        if is_promised:
            return True
        missing = sequence.num_blocks_for(len(sequence)) - len(cached)
        if missing + self._num_newly_pinned(cached) + self._headroom > self._free:
            return False
        self._places -= 1
        self._free -= missing
        self._admit(sequence, Phase.RUNNING, cached, num_blocks=missing)
        self._add_work(sequence, len(cached) * sequence.block_size, len(sequence))
        return True

    @property
    def _headroom(self) -> int:
        """Blocks left for the running sequences to grow into, lest a new one be preempted at once."""
        return len(self._queues.running)

    def _cached(self, sequence: Sequence) -> tuple[list[int], bool]:
        """The cached blocks of its prefix, and whether the next one is just being computed by another."""
        keys = sequence.prefix_keys()
        if keys and self._is_claimed(keys[-1]):  # the common case of a burst of equal prompts, at once
            return [], True
        cached = self._pool.lookup(keys)
        return cached, len(cached) < len(keys) and self._is_claimed(keys[len(cached)])

    def _is_claimed(self, key: bytes) -> bool:
        return key in self._queues.computing or key in self._claimed

    def _admit(self, sequence: Sequence, phase: Phase, cached: list[int], *, num_blocks: int) -> None:
        self._free -= self._num_newly_pinned(cached)
        self._pinned.update(cached)
        self._claimed.update(sequence.keys(len(cached), len(sequence)))
        self.admitted.append(Admission(sequence, phase, tuple(cached), num_blocks))

    def _num_newly_pinned(self, cached: list[int]) -> int:
        return sum(1 for block in cached if not self._pool.references(block) and block not in self._pinned)

    def _add_work(self, sequence: Sequence, start: int, stop: int, num_blocks: int = 0) -> None:
        stop = min(stop, start + self._budget)
        if stop > start:
            self._budget -= stop - start
            self.work.append(Work(sequence, start, stop, num_blocks, stop == len(sequence.tokens)))

    def _make_room(self, count: int, sequence: Sequence) -> bool:
        """Preempts from the end until `count` blocks are free; False if `sequence` cannot run now."""
        while count > self._free:
            victim = next(
                (s for s in reversed(self._queues.running) if not s.is_prefill and s not in self.preempted), None
            )
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self.preempted[victim] = None
        for block in victim.blocks:
            self._dropped[block] = self._dropped.get(block, 0) + 1
            self._free += self._pool.references(block) == self._dropped[block]
