"""The index of blocks against a naive one that keeps each worker's blocks in a set."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from components.routing.index import BlockIndex, block_keys, chains

WORKERS = ("a", "b", "c")


def make_chain(*words: int) -> list[int]:
    """Keys of a chain: each depends on all words up to its own."""
    parent, keys = b"", []
    for word in words:
        parent = hashlib.blake2b(parent + bytes([word]), digest_size=16).digest()
        keys += block_keys(parent)
    return keys


class NaiveIndex:
    def __init__(self) -> None:
        self.sets: dict[str, set[int]] = {worker: set() for worker in WORKERS}

    def overlaps(self, keys: list[int]) -> dict[str, int]:
        found = {}
        for worker, held in self.sets.items():
            depth = 0
            while depth < len(keys) and keys[depth] in held:
                depth += 1
            if depth:
                found[worker] = depth
        return found


CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=7)  # a binary tree: many shared prefixes
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from(WORKERS), CHAINS, st.integers(0, 6)),
        st.tuples(st.just("remove"), st.sampled_from(WORKERS), CHAINS, st.integers(0, 6)),
        st.tuples(st.just("remove_last"), st.sampled_from(WORKERS), CHAINS, st.integers(0, 6)),
        st.tuples(st.just("forget"), st.sampled_from(WORKERS), st.just([0]), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(MOVES, CHAINS)
def test_it_equals_a_naive_index_after_any_history(
    moves: list[tuple[str, str, list[int], int]], asked: list[int]
) -> None:
    index, naive = BlockIndex(10_000), NaiveIndex()
    for move, worker, words, cut in moves:
        keys = make_chain(*words)
        if move == "store":  # any stretch of a chain, also one whose predecessors are unknown
            first = min(cut, len(keys) - 1)
            index.store(worker, keys[first - 1] if first else None, keys[first:])
            naive.sets[worker].update(keys[first:])
        elif move == "remove":
            index.remove(worker, keys[cut:])
            naive.sets[worker].difference_update(keys[cut:])
        elif move == "remove_last":
            index.remove(worker, keys[-1:])
            naive.sets[worker].difference_update(keys[-1:])
        else:
            index.forget(worker)
            naive.sets[worker].clear()
        assert {w: index.keys_of(w) for w in WORKERS} == naive.sets
        assert [index.count(w) for w in WORKERS] == [len(naive.sets[w]) for w in WORKERS]
        assert len(index) >= len(set().union(*naive.sets.values()))
    assert index.overlaps(make_chain(*asked)) == naive.overlaps(make_chain(*asked))
    for worker in WORKERS:
        index.forget(worker)
    assert len(index) == 0


def test_a_gap_hides_what_is_behind_it_until_it_closes() -> None:
    index, keys = BlockIndex(100), make_chain(1, 2, 3, 4)
    index.store("a", None, keys)
    index.remove("a", keys[1:2])
    assert index.overlaps(keys) == {"a": 1}
    index.store("a", keys[0], keys[1:2])
    assert index.overlaps(keys) == {"a": 4}


def test_a_forgotten_worker_leaves_nothing_behind() -> None:
    index = BlockIndex(100)
    index.store("a", None, make_chain(1, 2, 3))
    index.store("b", None, make_chain(1, 2))
    index.forget("a")
    assert index.overlaps(make_chain(1, 2, 3)) == {"b": 2}
    assert len(index) == 2
    index.forget("b")
    assert len(index) == 0
    assert index.num_bytes < BlockIndex(100).num_bytes + 1_000


def test_a_full_index_takes_no_new_blocks_but_more_holders_and_counts_what_it_left_out() -> None:
    index, keys = BlockIndex(3), make_chain(1, 2, 3, 4, 5)
    index.store("a", None, keys)
    assert (len(index), index.num_dropped, index.overlaps(keys)) == (3, 2, {"a": 3})
    index.store("b", None, keys[:3])
    assert index.overlaps(keys) == {"a": 3, "b": 3}
    index.store("a", None, make_chain(9))
    assert (len(index), index.num_dropped) == (3, 3)


def test_packed_blocks_come_apart_into_chains() -> None:
    one, two = bytes(range(16)), bytes(range(1, 17))
    [first], [second] = block_keys(one), block_keys(two)
    root = bytes(16)
    assert list(chains(one + two, root + one)) == [(0, [first, second])]
    assert list(chains(one + two, root + root)) == [(0, [first]), (0, [second])]
    assert list(chains(one + two, b"")) == [(None, [first]), (None, [second])]
    assert list(chains(b"", b"")) == []
