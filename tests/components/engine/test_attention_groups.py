"""How decoding sequences are grouped: every one once, padding bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from components.engine.attention import decode_groups


def padding(sizes: list[int], group: list[int]) -> int:
    longest = max(sizes[i] for i in group)
    return sum(longest - sizes[i] for i in group)


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(0, 100))
def test_every_sequence_once_and_padding_bounded(sizes: list[int], overhead: int) -> None:
    groups = decode_groups(sizes, overhead)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    assert all(padding(sizes, group) <= overhead for group in groups)


def test_equal_lengths_stay_together() -> None:
    assert decode_groups([9] * 16) == [list(range(16))]


def test_a_long_one_stands_apart() -> None:
    assert decode_groups([3, 400, 3]) == [[1], [0, 2]]


def test_nothing_to_group() -> None:
    assert decode_groups([]) == []
