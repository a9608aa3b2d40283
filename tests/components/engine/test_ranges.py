"""Which heads each rank holds: all of them, in order, none without its keys."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.engine.ranges import Share, cut, share_heads
from graph import LaunchError


def test_the_default_model_on_two_ranks_is_uneven():
    assert share_heads(9, 3, 2) == [Share(0, 6, 0, 2), Share(6, 9, 2, 3)]


def test_fewer_kv_heads_than_ranks_are_held_by_several():
    assert share_heads(8, 2, 4) == [Share(0, 2, 0, 1), Share(2, 4, 0, 1), Share(4, 6, 1, 2), Share(6, 8, 1, 2)]
    assert share_heads(6, 2, 3) == [Share(0, 2, 0, 1), Share(2, 3, 0, 1), Share(3, 6, 1, 2)]


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(LaunchError, match="4 attention heads cannot be divided among tp=5"):
        share_heads(4, 2, 5)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_every_query_head_has_one_rank_which_holds_its_keys(num_kv_heads, group, num_ranks):
    num_query_heads = num_kv_heads * group
    if num_ranks > num_query_heads:
        return
    shares = share_heads(num_query_heads, num_kv_heads, num_ranks)

    assert len(shares) == num_ranks
    assert [head for s in shares for head in range(s.query_start, s.query_stop)] == list(range(num_query_heads))
    for s in shares:
        assert s.num_query_heads > 0
        keys = {head // group for head in range(s.query_start, s.query_stop)}
        assert keys == set(range(s.kv_start, s.kv_stop))
        assert s.num_query_heads % s.num_kv_heads == 0


@given(st.integers(0, 1_000), st.integers(1, 20))
def test_a_cut_covers_everything_and_its_parts_differ_by_one_at_most(total, parts):
    ranges = cut(total, parts)

    assert [ranges[0][0], ranges[-1][1]] == [0, total]
    assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
