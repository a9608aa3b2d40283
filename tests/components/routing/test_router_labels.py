"""Snowflakes: unique across processes, restarts and clocks that misbehave."""

from __future__ import annotations

import pytest

from components.routing.labels import EPOCH_MS, Labels, Snowflake
from graph import Refused


class Clock:
    def __init__(self, ms: float) -> None:
        self.ms = EPOCH_MS + ms

    def __call__(self) -> float:
        return self.ms


def make_snowflake(clock: Clock, *, host: str = "h", pid: int = 1, boot: str = "b") -> Snowflake:
    return Snowflake(host, pid, boot, clock)


def test_labels_grow_and_fit_a_signed_64_bit_integer() -> None:
    clock = Clock(1000)
    flake = make_snowflake(clock)
    minted = []
    for step in range(3):
        clock.ms += step
        minted += [flake.mint() for _ in range(3)]
    assert minted == sorted(set(minted))
    assert all(0 < label < 1 << 63 for label in minted)


def test_more_labels_than_one_millisecond_holds_stay_unique() -> None:
    flake = make_snowflake(Clock(1000))
    assert len({flake.mint() for _ in range(5000)}) == 5000


def test_a_clock_set_back_repeats_nothing() -> None:
    clock = Clock(1000)
    flake = make_snowflake(clock)
    before = flake.mint()
    clock.ms -= 500
    assert flake.mint() > before


@pytest.mark.parametrize("other", [{"host": "other"}, {"pid": 2}, {"boot": "after-restart"}])
def test_another_origin_mints_other_labels_at_the_same_time(other: dict[str, str]) -> None:
    one, two = make_snowflake(Clock(1000)), make_snowflake(Clock(1000), **other)  # type: ignore[arg-type]
    assert {one.mint() for _ in range(100)}.isdisjoint({two.mint() for _ in range(100)})


def test_attempts_of_one_request_share_its_label_until_the_last_is_released() -> None:
    labels = Labels(make_snowflake(Clock(1000)))
    assert labels.claim(9, "a") == labels.claim(9, "a") == 9
    labels.release(9)
    with pytest.raises(Refused):
        labels.claim(9, "b")
    labels.release(9)
    assert labels.claim(9, "b") == 9


def test_a_minted_label_never_meets_one_that_a_client_chose() -> None:
    coming = make_snowflake(Clock(1000)).mint()
    labels = Labels(make_snowflake(Clock(1000)))
    labels.claim(coming, "a")
    assert labels.claim(None, "b") != coming
