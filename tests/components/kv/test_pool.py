"""The block pool: references, prefix cache, eviction, quarantine, events, and its invariants under any use."""

from __future__ import annotations

from itertools import count, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from components.kv.free import FreeBlocks
from components.kv.pool import BlockPool
from components.messages import BLOCK_HASH_BYTES, BlocksRemoved, BlocksStored

ROOT = b"r" * BLOCK_HASH_BYTES


def unit(number: int) -> bytes:
    return number.to_bytes(BLOCK_HASH_BYTES, "big")


def enter_chain(pool: BlockPool, blocks: list[int], first: int = 0) -> list[bytes]:
    """Enters blocks as a chain of one unit each, numbered from `first`."""
    keys = [unit(first + i) for i in range(len(blocks))]
    for i, block in enumerate(blocks):
        pool.enter(block, parent=keys[i - 1] if i else ROOT, units=[keys[i]])
    return keys


def test_blocks_allocated_together_are_neighbours() -> None:
    pool = BlockPool(10)
    assert pool.allocate(4) == [0, 1, 2, 3]
    assert pool.allocate(6) == [4, 5, 6, 7, 8, 9]
    assert pool.num_free == 0


def test_an_allocation_goes_on_behind_the_last_block() -> None:
    pool = BlockPool(10)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(second)
    assert pool.allocate(3, after=first[-1]) == [2, 3, 4]


def test_freed_runs_merge_again_whatever_the_order() -> None:
    free = FreeBlocks(6)
    taken = free.take(6)
    for block in (4, 0, 2, 5, 1, 3):
        free.put(taken[block])
    assert free.take(6) == [0, 1, 2, 3, 4, 5]


def test_small_allocations_fill_holes_before_they_break_runs() -> None:
    free = FreeBlocks(8)
    free.take(8)
    for block in (0, 3, 4, 5, 6):
        free.put(block)
    assert free.take(1) == [0]
    assert free.take(4) == [3, 4, 5, 6]


def test_a_cached_prefix_is_found_as_far_as_it_goes() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    keys = enter_chain(pool, blocks)
    assert pool.lookup([*keys[:2], unit(99), keys[2]]) == blocks[:2]
    assert pool.lookup([unit(99), *keys]) == []


def test_idle_blocks_count_as_free_and_go_least_recent_first_children_before_parents() -> None:
    pool = BlockPool(4)
    old = pool.allocate(2)
    old_keys = enter_chain(pool, old, first=0)
    new = pool.allocate(2)
    new_keys = enter_chain(pool, new, first=10)
    pool.free(old)
    pool.free(new)
    assert pool.num_free == 4
    assert pool.num_cached == 4
    pool.allocate(3)
    assert pool.lookup(old_keys) == []
    assert pool.lookup(new_keys) == [new[0]]


def test_some_more_are_evicted_than_are_needed_still_in_their_order() -> None:
    pool = BlockPool(64, evicted_ahead=4 / 64)
    old, new = pool.allocate(32), pool.allocate(32)
    old_keys, new_keys = enter_chain(pool, old, first=0), enter_chain(pool, new, first=100)
    pool.free(old)
    pool.free(new)
    held = pool.allocate(2)
    assert pool.lookup(old_keys) == old[:26]
    assert pool.lookup(new_keys) == new
    held += pool.allocate(4)
    assert len(pool.lookup(old_keys)) == 26
    pool.verify([held])


def test_eviction_ahead_ends_with_the_idle_blocks() -> None:
    pool = BlockPool(64, evicted_ahead=0.5)
    kept, idle = pool.allocate(54), pool.allocate(10)
    enter_chain(pool, idle)
    pool.free(idle)
    kept += pool.allocate(3)
    assert pool.num_cached == 0
    assert pool.num_free == 7
    pool.verify([kept])


def test_a_pool_long_in_use_still_gives_neighbours() -> None:
    """Prompts of 20 to 120 blocks come and go in any order and stay cached until they are evicted."""
    random, pool, live = Random(3), BlockPool(3_200), []
    numbers = count()
    pieces = blocks_given = 0
    for turn in range(1_200):
        while len(live) >= 12:
            pool.free(live.pop(random.randrange(len(live))))
        blocks = pool.allocate(random.randint(20, 120))
        enter_chain(pool, blocks, first=1_000 * next(numbers))
        live.append(blocks)
        if turn >= 600:
            pieces += 1 + sum(after != before + 1 for before, after in pairwise(blocks))
            blocks_given += len(blocks)
    assert blocks_given / pieces > 8


def test_a_pinned_block_is_never_evicted() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    keys = enter_chain(pool, blocks)
    pool.free(blocks)
    pool.pin(blocks)
    assert pool.num_free == 2
    pool.allocate(2)
    assert pool.lookup(keys) == blocks


def test_a_second_holder_of_a_prefix_does_not_replace_the_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(1), pool.allocate(1)
    keys = enter_chain(pool, first)
    enter_chain(pool, second)
    assert pool.lookup(keys) == first
    pool.free(second)
    assert pool.num_free == 3
    pool.verify([first])


def test_events_of_a_chain_merge_and_keep_their_order() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    keys = enter_chain(pool, blocks)
    assert pool.take_events() == (BlocksStored(ROOT, keys[0] + keys[1]),)
    pool.free(blocks)
    again = pool.allocate(2)
    enter_chain(pool, again[:1], first=5)
    assert pool.take_events() == (BlocksRemoved(keys[1] + keys[0]), BlocksStored(ROOT, unit(5)))
    assert pool.take_events() == ()


def test_units_that_two_blocks_share_are_told_once_and_gone_with_the_last() -> None:
    pool = BlockPool(2)
    one, two = pool.allocate(1), pool.allocate(1)
    pool.enter(one[0], parent=ROOT, units=[unit(1), unit(2)])
    pool.enter(two[0], parent=ROOT, units=[unit(1), unit(3)])
    assert pool.take_events() == (BlocksStored(ROOT, unit(1) + unit(2)), BlocksStored(unit(1), unit(3)))
    pool.free(one)
    pool.free(pool.allocate(1))
    assert pool.take_events() == (BlocksRemoved(unit(2)),)
    pool.free(two)
    pool.allocate(2)
    assert pool.take_events() == (BlocksRemoved(unit(1) + unit(3)),)


def test_quarantined_blocks_are_neither_free_nor_used_until_settled() -> None:
    pool = BlockPool(4)
    pool.quarantine("a", pool.allocate(3))
    assert (pool.num_free, pool.num_used, pool.num_quarantined) == (1, 0, 3)
    assert pool.settle("unknown") == 0
    assert pool.settle("a") == 3
    assert pool.settle("a") == 0
    assert pool.num_free == 4


def test_misuse_is_caught() -> None:
    pool = BlockPool(3)
    cached, freed = pool.allocate(2)
    enter_chain(pool, [cached])
    pool.free([freed])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([freed])
    with pytest.raises(AssertionError, match="3 blocks asked of 2"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="in the cache"):
        pool.quarantine("a", [cached])
    with pytest.raises(AssertionError, match="not in the cache"):
        pool.pin([freed])


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocations, matches, frees, lendings; a mirror follows the events."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.holders: list[tuple[list[int], int]] = []  # blocks, and how many of them are in the cache
        self.lent: list[str] = []
        self.content: dict[int, bytes] = {}  # block -> what it was last entered with
        self.mirror: set[bytes] = set()
        self.numbers = iter(range(1_000_000))

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            blocks = self.pool.allocate(count)
            for block in blocks:
                self.content.pop(block, None)
            self.holders.append((blocks, 0))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), number=st.integers(0, 6))
    def enter(self, data: Any, number: int) -> None:
        """Few different chains, so that prefixes collide."""
        index = data.draw(st.integers(0, len(self.holders) - 1))
        blocks, entered = self.holders[index]
        if entered < len(blocks):
            units = [unit(100 * entered), unit(100 * entered + 1 + number)]
            self.pool.enter(blocks[entered], parent=ROOT, units=units)
            if self.pool.lookup(units[-1:]) == [blocks[entered]]:
                self.content[blocks[entered]] = units[-1]
            self.holders[index] = (blocks, entered + 1)

    @rule(numbers=st.lists(st.integers(0, 6), max_size=3))
    def match(self, numbers: list[int]) -> None:
        keys = [unit(100 * depth + 1 + number) for depth, number in enumerate(numbers)]
        blocks = self.pool.lookup(keys)
        assert [self.content[block] for block in blocks] == keys[: len(blocks)]
        self.pool.pin(blocks)
        self.holders.append((blocks, len(blocks)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), is_lent=st.booleans())
    def give_back(self, data: Any, is_lent: bool) -> None:
        blocks, entered = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        if is_lent:
            owner = str(next(self.numbers))
            self.pool.quarantine(owner, blocks[entered:])
            self.lent.append(owner)
            blocks = blocks[:entered]
        self.pool.free(blocks)

    @precondition(lambda self: self.lent)
    @rule()
    def settle(self) -> None:
        self.pool.settle(self.lent.pop(0))

    @invariant()
    def books_balance(self) -> None:
        self.pool.verify([blocks for blocks, _ in self.holders])

    @invariant()
    def events_tell_the_cache(self) -> None:
        for event in self.pool.take_events():
            hashes = event.hashes  # type: ignore[attr-defined]
            units = [hashes[i : i + BLOCK_HASH_BYTES] for i in range(0, len(hashes), BLOCK_HASH_BYTES)]
            if isinstance(event, BlocksStored):
                assert self.mirror.isdisjoint(units)
                self.mirror.update(units)
            else:
                assert self.mirror.issuperset(units)
                self.mirror.difference_update(units)
        assert self.mirror == set(self.pool._unit_counts)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
