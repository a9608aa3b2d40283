"""What live placements will bring, block by block."""

from __future__ import annotations

from components.routing.expected import EXPECTED_S, Expected, Promise

A, B = "boot-a", "boot-b"


def expecting(*promises: Promise, key: str = "p") -> Expected:
    expected = Expected()
    expected.expect(key, promises, 0.0)
    return expected


def test_what_is_expected_extends_what_is_there() -> None:
    expected = expecting(Promise(A, [3, 4]))
    assert expected.extend({A: 2, B: 1}, [1, 2, 3, 4, 5]) == {A: 4, B: 1}
    assert expected.extend({}, [1, 2, 3]) == {}  # there is a gap before it
    assert expected.extend({}, [3, 4]) == {A: 2}


def test_the_given_overlaps_stay_as_they_are() -> None:
    overlaps = {A: 2}
    expecting(Promise(A, [3])).extend(overlaps, [1, 2, 3])
    assert overlaps == {A: 2}


def test_blocks_that_arrived_are_expected_no_more() -> None:
    expected = expecting(Promise(A, [1, 2, 3]))
    expected.arrived(A, [1, 2])
    assert expected.count(A) == 1
    expected.arrived(A, [3])
    assert expected.count(A) == 0
    assert expected.drop("p") == (A,)


def test_the_end_of_a_placement_takes_back_what_it_promised() -> None:
    expected = expecting(Promise(A, [1, 2]))
    assert expected.drop("p") == (A,)
    assert expected.count(A) == 0
    assert expected.drop("p") == ()


def test_blocks_count_once_however_many_placements_wait_for_them() -> None:
    expected = expecting(Promise(A, [1, 2]), key="first")
    expected.expect("second", [Promise(A, [])], 0.0)  # all of it is expected already
    assert expected.count(A) == 2
    expected.drop("second")
    assert expected.count(A) == 2


def test_prefill_has_nothing_to_do_once_the_generating_worker_has_the_prompt() -> None:
    expected = expecting(Promise(A, [1, 2]), Promise(B, [1, 2]))
    assert expected.arrived(A, [1]) == ()
    assert expected.count(B) == 2
    assert set(expected.arrived(A, [2])) == {A, B}
    assert expected.count(B) == 0


def test_what_never_comes_is_dropped_after_a_while() -> None:
    expected = expecting(Promise(A, [1]), key="old")
    expected.expect("new", [Promise(B, [2])], 10.0)
    assert expected.expire(EXPECTED_S - 1) == ()
    assert expected.expire(EXPECTED_S) == (A,)
    assert (expected.count(A), expected.count(B)) == (0, 1)


def test_a_worker_that_is_forgotten_is_expected_to_bring_nothing() -> None:
    expected = expecting(Promise(A, [1]), Promise(B, [1]))
    expected.forget(A)
    assert (expected.count(A), expected.count(B)) == (0, 1)
    assert set(expected.drop("p")) == {A, B}
