"""Mode "remote", step by step: matched, reserved, pulled, adopted, and every other way out."""

from __future__ import annotations

from desk import Desk, expected, make_request, transfer

from components.engine.outputs import Matched, Reserved, StepTokens


def test_a_remote_prompt_is_matched_reserved_pulled_and_adopted() -> None:
    desk = Desk()
    request = make_request("r", 22, mode="remote", max_tokens=6)
    desk.submit(make_request("before", 9), request)
    desk.step()
    desk.run()
    assert desk.of("r", Matched)[0].cached_tokens == 8
    desk.book.reserve("r")
    desk.run()
    reserved = desk.of("r", Reserved)[0]
    assert (reserved.first_token, len(reserved.block_ids)) == (8, 4)
    transfer(desk, reserved, request.tokens)
    desk.book.adopt("r", token=expected(request)[0], logprobs=None)
    desk.run()
    assert desk.tokens("r") == expected(request)
    assert desk.of("r", StepTokens)[0].cached_tokens == 8
    desk.submit(make_request("after", 22))
    desk.run()
    assert desk.of("after", StepTokens)[0].cached_tokens == 20


def test_what_was_lent_is_quarantined_until_settled_whatever_the_owner_does() -> None:
    for leave in ("abort", "compute_locally"):
        desk = Desk(num_blocks=16)
        request = make_request("r", 22, mode="remote")
        desk.submit(request)
        desk.run()
        desk.book.reserve("r")
        desk.run()
        getattr(desk.book, leave)("r")
        desk.step()
        assert desk.pool.num_quarantined == 6
        desk.runner.memory[list(desk.of("r", Reserved)[0].block_ids)] = 77  # a late READ lands
        desk.run()
        assert desk.pool.num_quarantined == 6
        desk.pool.settle("r")
        assert desk.pool.num_free == 16
        assert desk.tokens("r") == (expected(request) if leave == "compute_locally" else [])


def test_pinned_prefixes_of_remote_prompts_never_block_each_other() -> None:
    desk = Desk(num_blocks=12)
    for id in "abc":
        desk.submit(make_request(id, [ord(id)] * 13, max_tokens=1))
    desk.run()
    requests = [make_request(f"r{id}", [ord(id)] * 26, mode="remote", max_tokens=2) for id in "abc"]
    desk.submit(*requests)
    for _ in range(3):
        desk.run()
        for request in requests:
            desk.book.reserve(request.id)
        desk.run()
        for request in requests:
            if reserved := desk.of(request.id, Reserved):
                transfer(desk, reserved[0], request.tokens)
                desk.book.adopt(request.id, token=expected(request)[0], logprobs=None)
    desk.run()
    assert [desk.tokens(r.id) for r in requests] == [expected(r) for r in requests]


def test_a_reservation_passes_a_stuck_queue_when_nothing_runs() -> None:
    desk = Desk(num_blocks=12)
    desk.submit(make_request("before", 20, max_tokens=1))
    desk.run()
    desk.submit(make_request("remote", 40, mode="remote"))
    desk.run()
    desk.submit(make_request("stuck", [1] * 32, priority=1))  # needs 8 blocks; 5 of 12 are pinned
    desk.run()
    assert desk.of("stuck", StepTokens) == []
    desk.book.reserve("remote")
    desk.run()
    assert len(desk.of("remote", Reserved)) == 1
    desk.book.abort("remote")
    desk.pool.settle("remote")
    desk.run()
    assert desk.finish("stuck") == "length"
