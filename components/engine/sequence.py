"""A sequence in the engine: its tokens, its blocks, and how far it has come.

Its phases are those of the life cycle in `engine.py`. Only `book.py` changes a sequence, and only
between steps. While a step runs, the token it chooses is pending: it counts, but nobody knows it yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from components.engine.runner import Ints
from components.kv.hashing import chain_hashes, root_hash
from components.messages import Sampling

if TYPE_CHECKING:
    from components.engine.outputs import EngineRequest

_SPARE = 64
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


class Ids:
    """A growing array of int32. Views of it stay valid and unchanged while it grows; setting shows in them."""

    __slots__ = ("_data", "size")

    def __init__(self, ids: Items[int] = ()) -> None:
        self.size = len(ids)
        self._data = np.empty(self.size + _SPARE, np.int32)
        self._data[: self.size] = ids

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return int(self._data[index if index >= 0 else self.size + index])

    def append(self, id: int) -> None:
        size = self.size
        if size == len(self._data):
            self._grow(size + 1)
        self._data[size] = id
        self.size = size + 1

    def __setitem__(self, index: int, id: int) -> None:
        self._data[index] = id

    def extend(self, ids: Items[int]) -> None:
        size = self.size + len(ids)
        self._grow(size)
        self._data[self.size : size] = ids
        self.size = size

    def view(self, start: int = 0, stop: int | None = None) -> Ints:
        """Elements [start, stop), not copied."""
        return self._data[start : self.size if stop is None else stop]

    def clear(self) -> None:
        """Forgets all; a new array follows, so that old views keep what they show."""
        self._data = np.empty(_SPARE, np.int32)
        self.size = 0

    def _grow(self, size: int) -> None:
        if size > len(self._data):
            grown = np.empty(2 * size, np.int32)
            grown[: self.size] = self._data[: self.size]
            self._data = grown


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
        self.tokens = Ids(request.tokens)
        self.num_prompt_tokens = request.num_prompt_tokens
        self.max_length = min(max_length, _wanted_length(request))  # with so many tokens it ends, whatever they are
        self.num_computed = 0
        self.blocks = Ids()
        self.num_entered = 0  # leading blocks that were matched in or entered into the cache
        self.num_lent = 0  # trailing blocks lent to a transfer
        self.cached_tokens: int | None = None  # set once, by the first match
        self.num_pending = 0  # trailing tokens that a launched step is choosing; `tokens` has `PENDING` in their place
        self.feed = -1  # the last pending token's place among the samples of the step launched last; -1: none pends
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
        return self.tokens.size

    def __repr__(self) -> str:
        return f"Sequence({self.id}, {self.phase.value}, {self.num_computed}/{len(self)} tokens, {self.blocks.view()})"

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is not computed yet."""
        return self.tokens.size - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        """Tokens beyond the prompt, those of earlier attempts included."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest token has been computed, and that one is no prompt's last."""
        return self.tokens.size - self.num_computed == 1 and self.num_computed > 0

    @property
    def is_preemptible(self) -> bool:
        """A prompt that is computed for somebody else is being read meanwhile, so it stays."""
        return self.request.mode != "prefill"

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_blocks_missing(self, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` tokens can be held."""
        missing = -(-num_tokens // self.block_size) - self.blocks.size
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
        tokens = self.tokens.view(done, len(self.tokens) - self.num_pending).astype("<i4").tobytes()
        self._units += chain_hashes(tokens, self._hash_unit, parent=parent)


def _wanted_length(request: EngineRequest) -> int:
    if request.mode == "prefill":
        return len(request.tokens) + 1
    return request.num_prompt_tokens + request.stopping.max_tokens


def _has_penalties(sampling: Sampling) -> bool:
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
