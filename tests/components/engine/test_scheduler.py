"""The scheduler and the books, step by step with the fake runner and no thread."""

from __future__ import annotations

import pytest
from desk import BLOCK, GREEDY, Desk, expected, make_request

from components.engine.fake import fake_generate
from components.engine.outputs import ChunkComputed, Ended, StepTokens
from components.engine.scheduler import Plan
from components.messages import Stopping
from graph import Overloaded, Refused, RequestCancelled


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 41])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_a_request_alone_gets_the_oracles_tokens(length: int, budget: int) -> None:
    desk = Desk(budget=budget)
    request = make_request("a", length, max_tokens=9)
    desk.submit(request)
    desk.run()
    assert desk.tokens("a") == expected(request)
    assert desk.finish("a") == "length"
    assert desk.pool.num_used == 0


def test_decodes_go_first_and_a_chunk_fills_the_rest_of_the_step() -> None:
    desk = Desk(budget=8)
    desk.submit(make_request("a", 3, max_tokens=9))
    desk.step()
    desk.submit(make_request("b", list(range(20))))
    plan = desk.step()
    assert [(w.sequence.id, w.num_tokens) for w in plan.work] == [("a", 1), ("b", 7)]


def test_a_request_takes_what_another_left_in_the_cache_but_computes_one_token() -> None:
    desk = Desk()
    desk.submit(make_request("a", 3 * BLOCK))
    desk.run()
    desk.submit(make_request("b", 3 * BLOCK), make_request("c", 3 * BLOCK + 1))
    desk.run()
    assert [desk.of(id, StepTokens)[0].cached_tokens for id in "abc"] == [0, 2 * BLOCK, 3 * BLOCK]
    assert [o.cached_tokens for o in desk.of("c", StepTokens)[1:]] == [None] * 3
    assert desk.tokens("a") == desk.tokens("b")


def test_another_salt_shares_nothing() -> None:
    desk = Desk()
    desk.submit(make_request("a", 13, cache_salt="one"))
    desk.run()
    desk.submit(make_request("b", 13, cache_salt="two"), make_request("c", 13))
    desk.run()
    assert [desk.of(id, StepTokens)[0].cached_tokens for id in "bc"] == [0, 0]


def test_generated_tokens_are_cached_too() -> None:
    desk = Desk()
    first = make_request("a", 6, max_tokens=7)
    desk.submit(first)
    desk.run()
    desk.submit(make_request("b", [*first.tokens, *desk.tokens("a"), 5]))
    desk.run()
    assert desk.of("b", StepTokens)[0].cached_tokens == 3 * BLOCK  # 6 + 7 - 1 tokens have KV


def test_a_burst_of_equal_prompts_is_computed_once() -> None:
    desk = Desk(budget=16)
    requests = [make_request(str(i), 42, seed=i) for i in range(8)]
    desk.submit(*requests)
    plans = desk.run()
    prompt_tokens = sum(w.num_tokens for plan in plans for w in plan.work) - 8 * 3
    assert prompt_tokens == 42 + 7 * 2
    assert [desk.tokens(r.id) for r in requests] == [expected(r) for r in requests]


@pytest.mark.parametrize("end", ["abort", "fail", "preempt"])
def test_those_who_wait_for_a_shared_prefix_get_on_when_its_owner_does_not(end: str) -> None:
    desk = Desk(budget=8)
    desk.submit(make_request("owner", 30), make_request("heir", 30))
    desk.step()
    assert desk.sequence("heir").num_computed == 0
    match end:
        case "abort":
            desk.book.abort("owner")
        case "fail":
            desk.book.fail(desk.sequence("owner"), RequestCancelled("x"))
        case "preempt":
            desk.book.apply(Plan(preempted=(desk.sequence("owner"),)))
    desk.run()
    assert desk.tokens("heir") == expected(make_request("heir", 30))


def test_higher_priority_goes_first_then_arrival() -> None:
    desk = Desk(max_num_seqs=1)
    desk.submit(make_request("a", 5), make_request("b", [1, 2], priority=1), make_request("c", [1, 2, 3], priority=1))
    desk.run()
    assert [o.id for o in desk.told if isinstance(o, StepTokens) and o.finish] == ["b", "c", "a"]


@pytest.mark.parametrize("caching", [True, False])
def test_the_youngest_is_preempted_and_its_text_stays_right(caching: bool) -> None:
    desk = Desk(num_blocks=9, caching=caching)
    requests = [make_request(id, [ord(id)] * 7, max_tokens=20) for id in "abc"]
    desk.submit(*requests)
    desk.run()
    assert desk.book.num_preemptions > 0
    for request in requests:
        assert desk.tokens(request.id) == expected(request)
    assert next(o.id for o in desk.told if isinstance(o, StepTokens) and o.finish) == "a"
    assert [[o.cached_tokens for o in desk.of(id, StepTokens)] for id in "abc"] == [[0] + [None] * 19] * 3


def test_preempting_one_who_shares_blocks_frees_only_its_own() -> None:
    desk = Desk(num_blocks=7)
    prefix = list(range(8))
    requests = [make_request(id, [*prefix, ord(id)], max_tokens=14) for id in "abcd"]
    desk.submit(*requests)
    desk.run()
    assert desk.book.num_preemptions > 1
    assert [desk.tokens(r.id) for r in requests] == [expected(r) for r in requests]


def test_a_request_that_just_fits_alone_runs_and_one_over_is_refused_with_both_numbers() -> None:
    desk = Desk(num_blocks=3)
    desk.submit(make_request("fits", 12, max_tokens=5), make_request("over", 13))
    desk.run()
    assert desk.tokens("fits") == expected(make_request("fits", 12, max_tokens=1))
    assert desk.finish("fits") == "length"
    error = desk.of("over", Ended)[0].error
    assert isinstance(error, Refused)
    assert error.code == "context_length_exceeded"
    assert "13 tokens" in error.message
    assert " 13 " in error.message.partition("KV pool")[2]


def test_a_sequence_ends_at_the_models_length() -> None:
    desk = Desk(max_model_len=10)
    desk.submit(make_request("a", 7, max_tokens=50), make_request("b", 10))
    desk.run()
    assert len(desk.tokens("a")) == 3
    assert desk.finish("a") == "length"
    assert "model" in desk.of("b", Ended)[0].error.message


def test_a_stop_token_is_told_and_ends_the_sequence_but_not_before_min_tokens() -> None:
    favourite = fake_generate(range(1_000, 1_005), 1, GREEDY)[0]
    desk = Desk()
    stop = make_request("stop", 5, stopping=Stopping(max_tokens=9, stop_token_ids=(favourite,)))
    later = make_request("later", 5, stopping=Stopping(max_tokens=3, min_tokens=2, stop_token_ids=(favourite,)))
    desk.submit(stop, later)
    desk.run()
    assert (desk.tokens("stop"), desk.finish("stop")) == ([favourite], "stop")
    assert desk.tokens("later") == expected(later)
    assert len(desk.tokens("later")) >= 2


def test_a_replaced_request_goes_on_behind_its_output() -> None:
    whole = expected(make_request("whole", 9, max_tokens=12, seed=4))
    desk = Desk()
    tokens = [*range(1_000, 1_009), *whole[:5]]
    desk.submit(make_request("rest", tokens, max_tokens=12, seed=4, num_prompt_tokens=9))
    desk.submit(make_request("nothing left", tokens, max_tokens=5, num_prompt_tokens=9))
    desk.run()
    assert desk.tokens("rest") == whole[5:]
    assert (desk.tokens("nothing left"), desk.finish("nothing left")) == ([], "length")


def test_the_waiting_room_is_bounded() -> None:
    desk = Desk()
    desk.submit(*(make_request(str(i), 5) for i in range(101)))
    desk.run()
    assert isinstance(desk.of("100", Ended)[0].error, Overloaded)


def test_a_prefill_is_told_chunk_by_chunk_and_held_until_its_release() -> None:
    desk = Desk(budget=8, num_blocks=8)
    desk.submit(make_request("p", 19, mode="prefill"))
    desk.run()
    chunks = desk.of("p", ChunkComputed)
    assert [(c.num_tokens, len(c.block_ids), c.token is not None) for c in chunks] == [
        (8, 2, False),
        (16, 4, False),
        (19, 5, True),
    ]
    assert [chunks[-1].token] == fake_generate(range(1_000, 1_019), 1, GREEDY)
    assert desk.pool.num_used == 5
    desk.book.release("p")
    desk.book.release("p")
    assert desk.pool.num_used == 0
