"""A simulated aggregated worker: the real block pool and its events, with a time model instead of a model.

waiting    first come, first served, until there is room for the whole sequence
running    chunks of its prompt, then a token a step
finished   blocks returned
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec
from traces import BLOCK_TOKENS, Request
from virtual import VirtualLoop

from components.kv.pool import BlockPool
from components.messages import BLOCK_HASH_BYTES, Load
from graph import Message

_ROOT = bytes(BLOCK_HASH_BYTES)


class Speed(msgspec.Struct, frozen=True):
    """How long a step takes, and what it may hold. About a 70B model on 8 GPUs of 2024."""

    step_s: float = 0.020
    prefill_token_s: float = 0.0001
    decode_sequence_s: float = 0.00005
    context_token_s: float = 2e-8
    max_tokens: int = 2_048
    max_sequences: int = 64
    num_blocks: int = 1_000


class Sequence:
    """One request on a worker."""

    def __init__(self, request: Request, on_first: Callable[[int], None], on_finish: Callable[[], None]) -> None:
        self.request = request
        self.on_first = on_first
        self.on_finish = on_finish
        hashes = request.hashes
        self.keys = [hashes[i : i + BLOCK_HASH_BYTES] for i in range(0, len(hashes), BLOCK_HASH_BYTES)]
        self.blocks: list[int] = []
        self.num_entered = 0
        self.num_cached = 0  # tokens
        self.num_computed = 0
        self.num_generated = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole sequence, output included."""
        return -(-(self.request.input_length + self.request.output_length) // BLOCK_TOKENS)

    @property
    def num_remaining(self) -> int:
        """Prompt tokens yet to compute."""
        return self.request.input_length - self.num_computed


class SimulatedWorker:
    """One worker on the virtual clock. `publish` takes its events and loads, as the router would get them."""

    def __init__(self, loop: VirtualLoop, speed: Speed, publish: Callable[[tuple[Message, ...], Load], None]) -> None:
        self.pool = BlockPool(speed.num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.busy_s = 0.0
        self._loop = loop
        self._speed = speed
        self._publish = publish
        self._computing: set[bytes] = set()
        self._is_busy = False

    def submit(self, sequence: Sequence) -> None:
        """A request arrives."""
        self.waiting.append(sequence)
        if not self._is_busy:
            self._begin()

    def load(self) -> Load:
        """As a worker reports it."""
        unfinished = (*self.waiting, *self.running)
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_used=self.pool.num_used,
            blocks_total=self.pool.num_blocks,
            prefill_tokens=sum(sequence.num_remaining for sequence in unfinished),
        )

    def _begin(self) -> None:
        """Plans a step; its end comes when its time has passed."""
        self._admit()
        self._publish(self.pool.take_events(), self.load())
        budget, chunks, decoding = self._speed.max_tokens, [], []
        for sequence in self.running:
            if sequence.num_remaining:
                chunk = min(budget, sequence.num_remaining)
                budget -= chunk
                chunks.append((sequence, chunk))
            else:
                decoding.append(sequence)
        self._is_busy = bool(chunks or decoding)
        if not self._is_busy:
            return
        speed = self._speed
        context = sum(sequence.request.input_length for sequence in decoding)
        duration_s = (
            speed.step_s
            + speed.prefill_token_s * sum(chunk for _, chunk in chunks)
            + speed.decode_sequence_s * len(decoding)
            + speed.context_token_s * context
        )
        self.busy_s += duration_s
        self._loop.call_later(duration_s, self._end, chunks, decoding)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._speed.max_sequences:
            sequence = self.waiting[0]
            cached = self.pool.lookup(sequence.keys[: (sequence.request.input_length - 1) // BLOCK_TOKENS])
            if len(cached) < len(sequence.keys) and sequence.keys[len(cached)] in self._computing:
                return  # the next block is just being computed by another
            pinned = sum(not self.pool.references(block) for block in cached)
            if sequence.num_blocks - len(cached) > self.pool.num_free - pinned:
                return
            self.waiting.popleft()
            self.pool.pin(cached)
            sequence.blocks = cached + self.pool.allocate(sequence.num_blocks - len(cached))
            sequence.num_entered = len(cached)
            sequence.num_cached = sequence.num_computed = len(cached) * BLOCK_TOKENS
            self._computing.update(sequence.keys[len(cached) :])
            self.running.append(sequence)

    def _end(self, chunks: list[tuple[Sequence, int]], decoding: list[Sequence]) -> None:
        for sequence, chunk in chunks:
            sequence.num_computed += chunk
            self._enter(sequence)
            if not sequence.num_remaining:
                sequence.on_first(sequence.num_cached)
                self._generate(sequence)
        for sequence in decoding:
            self._generate(sequence)
        self._begin()

    def _enter(self, sequence: Sequence) -> None:
        while sequence.num_entered < len(sequence.keys):
            index = sequence.num_entered
            if (index + 1) * BLOCK_TOKENS > sequence.num_computed:
                return
            parent = sequence.keys[index - 1] if index else _ROOT
            self.pool.enter(sequence.blocks[index], parent=parent, units=(sequence.keys[index],))
            self._computing.discard(sequence.keys[index])
            sequence.num_entered += 1

    def _generate(self, sequence: Sequence) -> None:
        sequence.num_generated += 1
        if sequence.num_generated >= sequence.request.output_length:
            self.pool.free(sequence.blocks)
            self.running.remove(sequence)
            sequence.on_finish()
