"""A sequence in the engine: its tokens, its blocks, and how far it has come.

Its phases are those of the life cycle in `engine.py`. Only `book.py` changes a sequence, and only
between steps. While a step runs, the token it chooses is pending: it counts, but nobody knows it yet.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

from components.kv.hashing import chain_hashes, root_hash
from components.messages import Sampling, pack_ids

if TYPE_CHECKING:
    from components.engine.outputs import EngineRequest

PENDING = -1


class Phase(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    MATCHED = "matched"
    RESERVING = "reserving"
    RESERVED = "reserved"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


class Sequence:
    """One sequence to compute. `blocks` cover at least the tokens computed so far."""

    def __init__(
        self, request: EngineRequest, *, arrival: int, block_size: int, hash_unit: int | None, max_length: int
    ) -> None:
        """`hash_unit` None leaves the sequence out of the prefix cache. No sequence grows beyond `max_length`."""
        self.id = request.id
        self.block_size = block_size
        self.request = request
        self.order = (-request.priority, arrival)
        self.phase = Phase.WAITING
        self.wants_match = request.mode == "remote"  # until its owner decided to compute locally
        self.tokens = array("i", request.tokens)  # of int32: `batch.py` joins pieces of them without a loop
        self.num_prompt_tokens = request.num_prompt_tokens
        self.max_length = min(max_length, _wanted_length(request))  # with so many tokens it ends, whatever they are
        self.num_computed = 0
        self.blocks = array("i")
        self.num_entered = 0  # leading blocks that were matched in or entered into the cache
        self.num_lent = 0  # trailing blocks lent to a transfer
        self.cached_tokens: int | None = None  # set once, by the first match
        self.num_pending = 0  # trailing tokens that a launched step is choosing; `tokens` has `PENDING` in their place
        self.feed = -1  # the last pending token's place among the samples of the step launched last; -1: none pends
        self.is_prefill = request.mode == "prefill"  # computed for somebody else, who reads its blocks meanwhile
        self.sampling = request.sampling
        self.needs_tokens = _has_penalties(request.sampling)  # whether a step needs to know the tokens before it
        self.is_plain = not (self.needs_tokens or request.sampling.logit_bias or request.stopping.min_tokens)
        self.is_told = False  # whether any token was reported
        self.arrived_s = 0.0
        self.queue_ms = 0.0
        self._hash_unit = hash_unit
        self._root = root_hash(request.cache_salt)
        self._units: list[bytes] = []
        self._extend_hashes()

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.id}, {self.phase.value}, {self.num_computed}/{len(self)} tokens, {self.blocks.tolist()})"
        )

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is not computed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        """Tokens beyond the prompt, those of earlier attempts included."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest token has been computed."""
        return len(self.tokens) - self.num_computed == 1 and self.num_computed > 0

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_blocks_missing(self, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` tokens can be held."""
        missing = -(-num_tokens // self.block_size) - len(self.blocks)
        return missing if missing > 0 else 0

    def take(self, token: int, place: int) -> None:
        """Puts a token that was pending in its place."""
        self.tokens[place] = token
        self.num_pending -= 1
        if not self.num_pending:
            self.feed = -1

    def prefix_keys(self) -> list[bytes]:
        """Cache keys of the full blocks that may be matched: at least one token is left to compute."""
        return self.keys(0, (len(self.tokens) - 1) // self.block_size)

    def keys(self, start: int, stop: int) -> list[bytes]:
        """Cache keys of blocks [start, stop), as far as their tokens are known."""
        if self._hash_unit is None:
            return []
        per_block = self.block_size // self._hash_unit
        return self._units[(start + 1) * per_block - 1 : stop * per_block : per_block]

    def has_final_blocks(self, num_computed: int) -> bool:
        """Whether the first `num_computed` tokens fill blocks that are not in the cache yet."""
        return self._hash_unit is not None and num_computed // self.block_size > self.num_entered

    def final_blocks(self, num_computed: int) -> Iterable[tuple[int, bytes, list[bytes]]]:
        """(block, parent, units) of the blocks that these tokens fill and that are not yet entered."""
        if self._hash_unit is None:
            return
        self._extend_hashes()
        per_block = self.block_size // self._hash_unit
        for index in range(self.num_entered, num_computed // self.block_size):
            first = index * per_block
            parent = self._units[first - 1] if first else self._root
            yield self.blocks[index], parent, self._units[first : first + per_block]

    def _extend_hashes(self) -> None:
        if self._hash_unit is None:
            return
        done = len(self._units) * self._hash_unit
        parent = self._units[-1] if self._units else self._root
        tokens = pack_ids(self.tokens[done : len(self.tokens) - self.num_pending])
        self._units += chain_hashes(tokens, self._hash_unit, parent=parent)


def _wanted_length(request: EngineRequest) -> int:
    if request.mode == "prefill":
        return len(request.tokens) + 1
    return request.num_prompt_tokens + request.stopping.max_tokens


def _has_penalties(sampling: Sampling) -> bool:
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
