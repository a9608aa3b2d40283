"""The book of placements against a naive recount."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from components.messages import Load, WorkerSnapshot
from components.routing.blocks import Blocks
from components.routing.workers import PENDING_S, Workers

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.integers(0, 2), st.integers(1, 50)),
        st.tuples(st.just("end"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 3), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 2), st.just(0)),
    ),
    max_size=40,
)


def make_workers() -> Workers:
    workers = Workers(Blocks(100), hash_unit=16)
    for i in range(3):
        workers.learn(f"decode/{i}", f"boot-{i}-0", WorkerSnapshot("decode", 16, Load()))
    return workers


@settings(max_examples=100, deadline=None)
@given(MOVES)
def test_counts_equal_a_recount_of_what_is_alive(moves: list[tuple[str, int, int]]) -> None:
    workers = make_workers()
    boots = {i: f"boot-{i}-0" for i in range(3)}
    alive: dict[str, str] = {}  # placement -> boot
    placed: list[tuple[float, str, int]] = []
    now_s = 0.0
    for number, (move, which, tokens) in enumerate(moves):
        if move == "place":
            workers.place(f"p{number}", [(f"decode/{which}", 0)], [], tokens, now_s)
            alive[f"p{number}"] = boots[which]
            placed.append((now_s, boots[which], tokens))
        elif move == "end":
            workers.end(f"p{which}")
            alive.pop(f"p{which}", None)
        elif move == "wait":
            now_s += which * PENDING_S / 2
        else:
            boots[which] = f"boot-{which}-{number}"
            workers.learn(f"decode/{which}", boots[which], WorkerSnapshot("decode", 16, Load()))
        counted = [
            (
                boot,
                sum(b == boot for b in alive.values()),
                sum(n for at_s, b, n in placed if b == boot and now_s - at_s < PENDING_S),
            )
            for boot in boots.values()
        ]
        assert [(view.boot, view.placed, view.pending_tokens) for view in workers.views(now_s)] == counted
        assert workers.num_placements == len(alive)


def test_a_worker_that_left_is_not_seen() -> None:
    workers = make_workers()
    workers.forget("decode/1")
    workers.forget("decode/1")
    assert [view.id for view in workers.views(0.0)] == ["decode/0", "decode/2"]
