"""How much of a GPU's memory a worker takes for its blocks, alone or beside others."""

from __future__ import annotations

from components.engine.memory import room_on_gpu

GIB = 1 << 30


def test_who_has_the_gpu_alone_takes_what_is_free() -> None:
    assert room_on_gpu(100 * GIB, 140 * GIB, 30 * GIB, 1.0) == 100 * GIB


def test_who_shares_a_gpu_goes_by_its_share_whoever_loads_first() -> None:
    first = room_on_gpu(124 * GIB, 140 * GIB, 16 * GIB, 0.5)
    second = room_on_gpu(124 * GIB - first - 16 * GIB, 140 * GIB, 16 * GIB, 0.5)

    assert first == second == 54 * GIB


def test_what_others_took_beyond_their_share_is_not_there() -> None:
    assert room_on_gpu(40 * GIB, 140 * GIB, 16 * GIB, 0.5) == 40 * GIB


def test_weights_larger_than_the_share_leave_nothing() -> None:
    assert room_on_gpu(60 * GIB, 140 * GIB, 80 * GIB, 0.5) == 0
