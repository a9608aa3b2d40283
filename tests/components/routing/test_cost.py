"""The cost of a request on a worker, as a pure function."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.messages import Role
from components.routing import cost
from components.routing.policies import Question, kv
from components.routing.view import WorkerView

ROLES: list[Role] = ["worker", "prefill", "decode"]


def make_view(
    id: str = "worker/0", role: Role = "worker", *, queued_tokens: int = 0, requests: int = 0, fill: float = 0.0
) -> WorkerView:
    """A worker as the book would show it."""
    return WorkerView(
        id, f"{id}-boot", role, requests=requests, queued_tokens=queued_tokens, fill=fill,
        standing=cost.standing(role, queued_tokens, requests), rate=cost.rate(role, fill),
    )  # fmt: skip


def ask(num_tokens: int, **overlaps: int) -> Question:
    """A question with overlaps by the worker's number: `w1=3`."""
    by_boot = {f"worker/{name[1:]}-boot": blocks for name, blocks in overlaps.items()}
    return Question(num_tokens, 16, by_boot)


@given(st.sampled_from(ROLES), st.integers(0, 100_000), st.integers(0, 1_000), st.floats(0, 1), st.integers(1, 100_000))
def test_the_terms_add_up_to_the_cost(role: Role, queued: int, requests: int, fill: float, missing: int) -> None:
    view = make_view(role=role, queued_tokens=queued, requests=requests, fill=fill)
    terms = cost.terms(view, missing)
    parts = (terms.missing, terms.queued, terms.requests, terms.displaced)
    assert sum(parts) == pytest.approx(cost.cost(view, missing))
    assert min(parts) >= 0


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("more", [{"queued_tokens": 500}, {"requests": 3}, {"fill": 0.5}])
def test_everything_that_keeps_a_worker_busy_costs(role: Role, more: dict[str, Any]) -> None:
    assert cost.cost(make_view(role=role, **more), 100) > cost.cost(make_view(role=role), 100)
    assert cost.cost(make_view(role=role), 101) > cost.cost(make_view(role=role), 100)


def test_waiting_for_an_equal_prompt_is_better_than_computing_it_twice() -> None:
    computing = make_view("worker/0", queued_tokens=1_504, requests=1)
    idle = make_view("worker/1")
    assert kv([computing, idle], ask(1_504, w0=94)).worker is computing


def test_a_queue_of_other_prompts_is_not_worth_a_short_overlap() -> None:
    busy = make_view("worker/0", queued_tokens=5_000)
    assert kv([busy, make_view("worker/1")], ask(1_504, w0=10)).worker.id == "worker/1"


def test_what_a_whole_prompt_costs_counts_its_last_token_though_all_is_cached() -> None:
    assert ask(160, w0=10).missing_tokens("worker/0-boot") == 1


def test_equal_costs_are_broken_by_luck() -> None:
    views = [make_view(f"worker/{i}") for i in range(4)]
    chosen = {kv(views, Question(100, 16, {}, luck=luck)).worker.id for luck in (0.0, 0.3, 0.6, 0.99)}
    assert len(chosen) == 4


def test_a_decode_worker_weighs_its_batch_above_what_it_has_to_fetch() -> None:
    decode = cost.WEIGHTS["decode"]
    assert decode.requests * 8 > decode.missing * 1_500
    assert cost.WEIGHTS["worker"].missing > decode.missing


def test_the_reason_tells_counts_with_their_nouns() -> None:
    assert kv([make_view(requests=1)], ask(1)).reason.endswith(": 1 of 1 token missing, 0 queued, 1 request")
