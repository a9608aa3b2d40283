"""Counts with their nouns."""

from __future__ import annotations

import pytest

from graph.words import counted, there_are


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0 GPUs"), (1, "1 GPU"), (2, "2 GPUs"), (1.0, "1 GPU"), (0.5, "0.5 GPUs")]
)
def test_a_count_has_its_noun(number: float, told: str) -> None:
    assert counted(number, "GPU") == told


def test_a_large_count_is_told_whole() -> None:
    assert counted(12_345_678, "token") == "12345678 tokens"


def test_there_is_one_and_there_are_others() -> None:
    assert [there_are(number) for number in (0, 1, 2)] == ["there are 0", "there is 1", "there are 2"]
