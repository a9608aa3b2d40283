"""The block pool: who holds which KV blocks, and which prefixes the rest still hold.

Life of a block:

    free          blank; handed out by `allocate`
    held          by one or more sequences (reference count); its content is theirs to write until
                  `enter` makes it final and matchable
    idle          held by nobody but still in the prefix cache: matched again by `pin`, or evicted,
                  least recently used first, when `allocate` needs room; then some more are evicted
                  with it, so that there are neighbours to choose from
    quarantined   a transfer may still write into it; free again after `settle`

A block enters the cache only when its KV is final, and from then on nobody writes into it. A match
is pinned before anything is allocated, so what a sequence refers to cannot change its content.
Used by the engine's thread alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from components.kv.free import FreeBlocks
from components.messages import BLOCK_HASH_BYTES, BlocksRemoved, BlocksStored
from graph import Message

EVICTED_AHEAD = 1 / 32
"""Part of the pool. What is evicted as it is needed lies scattered, and scattered blocks travel at half the speed."""


class BlockPool:
    """Reference counts, prefix cache and free list of `num_blocks` blocks."""

    def __init__(self, num_blocks: int, *, evicted_ahead: float = EVICTED_AHEAD) -> None:
        """Whenever blocks must be evicted, `evicted_ahead` of the pool is evicted beyond them."""
        self.num_blocks = num_blocks
        self._num_ahead = int(num_blocks * evicted_ahead)
        self._free = FreeBlocks(num_blocks)
        self._references = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[bytes, int] = {}  # hash of a block's last unit -> block
        self._units_of: dict[int, tuple[bytes, ...]] = {}  # entered block -> hashes of its units
        self._unit_counts: dict[bytes, int] = {}  # two blocks may share their first units
        self._quarantine: dict[str, list[int]] = {}
        self._num_quarantined = 0
        self._changes: list[_Change] = []

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free - self._num_quarantined

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix cache, held or idle."""
        return len(self._units_of)

    @property
    def num_quarantined(self) -> int:
        """Blocks a transfer may still write into."""
        return self._num_quarantined

    def references(self, block: int) -> int:
        """How many sequences hold `block`."""
        return self._references[block]

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest cached prefix of the chain `keys`; nothing is pinned yet."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def pin(self, blocks: Iterable[int]) -> None:
        """Takes a reference to cached or held blocks; undone by `free`."""
        for block in blocks:
            assert block in self._units_of, f"block {block} is not in the cache"
            self._references[block] += 1
            self._idle.pop(block, None)

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """`count` blocks for one holder, neighbours where possible, idle ones evicted as needed."""
        assert count <= self.num_free, f"{count} blocks asked of {self.num_free} free ones"
        if count > len(self._free):
            self._evict(count - len(self._free) + self._num_ahead)
        blocks = self._free.take(count, after=after)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Gives back one reference to each; the last of a chain will be the first to be evicted."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._units_of:
                self._idle[block] = None
            else:
                self._free.put(block)

    def enter(self, block: int, *, parent: bytes, units: Sequence[bytes]) -> None:
        """Puts a held block whose KV is final into the cache, under the hash of its last unit.

        `parent` is the hash before its first unit. A prefix that another block holds already is left there.
        """
        key = units[-1]
        assert self._references[block] > 0, f"block {block} is nobody's"
        assert block not in self._units_of, f"block {block} entered the cache before"
        if key in self._block_of:
            return
        self._block_of[key] = block
        self._units_of[block] = tuple(units)
        fresh = [unit for unit in units if not self._unit_counts.get(unit)]
        for unit in units:
            self._unit_counts[unit] = self._unit_counts.get(unit, 0) + 1
        if fresh:  # always the last ones: whoever knows a unit of a block knows those before it
            known = len(units) - len(fresh)
            self._note_stored(units[known - 1] if known else parent, fresh)

    def quarantine(self, owner: str, blocks: Sequence[int]) -> None:
        """Takes over its holder's reference to lent blocks until `settle(owner)`."""
        for block in blocks:
            assert self._references[block] == 1, f"block {block} is not held by one alone"
            assert block not in self._units_of, f"block {block} is in the cache, nobody may write into it"
            self._references[block] = 0
        if blocks:
            self._quarantine.setdefault(owner, []).extend(blocks)
            self._num_quarantined += len(blocks)

    def settle(self, owner: str) -> int:
        """Frees what was quarantined for `owner`; returns how many blocks."""
        blocks = self._quarantine.pop(owner, [])
        self._num_quarantined -= len(blocks)
        for block in blocks:
            self._free.put(block)
        return len(blocks)

    def take_events(self) -> tuple[Message, ...]:
        """What changed in the cache since the last call, in order, neighbours of a chain in one event."""
        changes, self._changes = self._changes, []
        return tuple(change.message() for change in changes)

    def verify(self, holders: Iterable[Iterable[int]]) -> None:
        """Checks every invariant against the blocks that each holder believes to hold; for tests."""
        expected = [0] * self.num_blocks
        for block in chain.from_iterable(holders):
            expected[block] += 1
        assert expected == self._references
        quarantined = list(chain.from_iterable(self._quarantine.values()))
        held = [block for block, count in enumerate(expected) if count]
        assert sorted([*self._free, *self._idle, *quarantined, *held]) == list(range(self.num_blocks))
        assert len(self._free) == sum(1 for _ in self._free)
        assert self._num_quarantined == len(quarantined)
        assert {units[-1]: block for block, units in self._units_of.items()} == self._block_of
        assert set(self._idle) <= set(self._units_of)
        counts: dict[bytes, int] = {}
        for unit in chain.from_iterable(self._units_of.values()):
            counts[unit] = counts.get(unit, 0) + 1
        assert counts == self._unit_counts

    def _evict(self, count: int) -> None:
        for _ in range(min(count, len(self._idle))):
            block, _ = self._idle.popitem(last=False)
            units = self._units_of.pop(block)
            del self._block_of[units[-1]]
            gone = []
            for unit in units:
                self._unit_counts[unit] -= 1
                if not self._unit_counts[unit]:
                    del self._unit_counts[unit]
                    gone.append(unit)
            self._note_removed(gone)
            self._free.put(block)

    def _note_stored(self, parent: bytes, units: list[bytes]) -> None:
        last = self._changes[-1] if self._changes else None
        if last is None or last.parent is None or last.hashes[-BLOCK_HASH_BYTES:] != parent:
            last = _Change(parent)
            self._changes.append(last)
        last.hashes += b"".join(units)

    def _note_removed(self, units: list[bytes]) -> None:
        last = self._changes[-1] if self._changes else None
        if last is None or last.parent is not None:
            last = _Change(None)
            self._changes.append(last)
        last.hashes += b"".join(units)


class _Change:
    """One event in the making: stored under `parent`, or removed (parent None)."""

    __slots__ = ("hashes", "parent")

    def __init__(self, parent: bytes | None) -> None:
        self.parent = parent
        self.hashes = bytearray()

    def message(self) -> Message:
        if self.parent is None:
            return BlocksRemoved(bytes(self.hashes))
        return BlocksStored(self.parent, bytes(self.hashes))
