"""The budget: first come, first served, and everyone's turn comes."""

from __future__ import annotations

from components.transfer.budget import Budget


class Line:
    """A budget, and who was granted a share, in order."""

    def __init__(self, capacity):
        self.budget = Budget(capacity)
        self.granted = []

    def take(self, key, amount):
        self.budget.take(key, amount, lambda: self.granted.append(key))


def test_shares_up_to_exactly_full_are_granted_at_once():
    line = Line(10)

    line.take("a", 4)
    line.take("b", 6)
    line.take("c", 1)

    assert line.granted == ["a", "b"]
    assert line.budget.used == 10


def test_nothing_small_passes_what_waits_before_it():
    line = Line(10)
    line.take("a", 8)
    line.take("big", 5)
    line.take("small", 1)

    assert line.granted == ["a"]
    line.budget.give("a")

    assert line.granted == ["a", "big", "small"]


def test_more_than_the_capacity_gets_all_of_it_alone():
    line = Line(10)
    line.take("a", 1)
    line.take("huge", 99)

    assert line.granted == ["a"]
    line.budget.give("a")

    assert line.granted == ["a", "huge"]
    assert line.budget.used == 10


def test_whoever_leaves_the_line_lets_the_next_ones_pass():
    line = Line(10)
    line.take("a", 8)
    line.take("big", 5)
    line.take("small", 1)

    line.budget.give("big")

    assert line.granted == ["a", "small"]


def test_giving_twice_and_giving_what_was_never_taken_change_nothing():
    line = Line(10)
    line.take("a", 8)
    line.budget.give("a")

    line.budget.give("a")
    line.budget.give("never")

    assert line.budget.is_idle
