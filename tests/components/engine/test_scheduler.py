"""The scheduler and the books, step by step with the fake runner and no thread.

`Desk` is the engine without its thread: it takes commands and steps, and keeps what was told. The
property tests drive it with any mix of requests, cancels and transfers, and hold every token
against the oracle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.engine.batch import assemble
from components.engine.book import Book
from components.engine.fake import FakeRunner, _slots, fake_generate
from components.engine.outputs import ChunkComputed, Ended, EngineRequest, Matched, Output, Reserved, StepTokens
from components.engine.scheduler import Limits, Plan, schedule
from components.engine.sequence import Sequence
from components.kv.pool import BlockPool
from components.messages import Sampling, Stopping
from components.options import FakeEngine
from graph import Overloaded, Refused, RequestCancelled

GREEDY = Sampling(temperature=0.0)
BLOCK = 4


def make_request(
    id: str, tokens: list[int] | int, *, max_tokens: int = 4, seed: int | None = None, **fields: Any
) -> EngineRequest:
    """A request for `tokens` (or for that many counted ones)."""
    tokens = list(range(1_000, 1_000 + tokens)) if isinstance(tokens, int) else tokens
    stopping = fields.pop("stopping", Stopping(max_tokens=max_tokens))
    sampling = GREEDY if seed is None else Sampling(seed=seed)
    fields.setdefault("num_prompt_tokens", len(tokens))
    return EngineRequest(id=id, tokens=tokens, sampling=sampling, stopping=stopping, **fields)


class Desk:
    """An engine without a thread."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        budget: int = 64,
        max_num_seqs: int = 16,
        caching: bool = True,
        max_model_len: int = 1_000,
        hash_unit: int = BLOCK,
    ) -> None:
        speed = FakeEngine(step_ms=0, token_ms=0)
        self.runner = FakeRunner(num_blocks=num_blocks, block_size=BLOCK, max_model_len=max_model_len, speed=speed)
        self.pool = BlockPool(num_blocks)
        self.limits = Limits(max_num_seqs, budget)
        self.book = Book(
            self.pool,
            block_size=BLOCK,
            hash_unit=hash_unit if caching else None,
            max_model_len=max_model_len,
            max_waiting=100,
        )
        self.told: list[Output] = []

    def submit(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.book.submit(request)

    def step(self) -> Plan:
        """One step; checks the books before and after."""
        plan = schedule(self.book.queues, self.pool, self.limits)
        self.book.apply(plan)
        self.verify()
        if plan.work:
            batch = assemble(plan.work)
            assert len(batch.input_ids) <= self.limits.max_num_batched_tokens
            assert len(plan.work) <= self.limits.max_num_seqs
            self.book.book(plan, self.runner.execute(batch))
        self.verify()
        self.told += self.book.take_outputs()
        return plan

    def run(self, max_steps: int = 500) -> list[Plan]:
        """Steps until nothing can be done."""
        plans = []
        while plan := self.step():
            plans.append(plan)
            assert len(plans) < max_steps, "the scheduler does not come to an end"
        return plans

    def verify(self) -> None:
        self.pool.verify(s.blocks.view().tolist() for s in self.book.queues)
        for key, owner in self.book.queues.computing.items():
            assert self.book.queues.find(owner.id) is owner, f"{key.hex()} is claimed by a dead sequence"

    def tokens(self, id: str) -> list[int]:
        return [t for o in self.told if isinstance(o, StepTokens) and o.id == id for t in o.tokens]

    def of(self, id: str, kind: type[Output]) -> list[Any]:
        return [o for o in self.told if o.id == id and isinstance(o, kind)]

    def finish(self, id: str) -> str | None:
        return self.of(id, StepTokens)[-1].finish

    def sequence(self, id: str) -> Sequence:
        found = self.book.queues.find(id)
        assert found is not None
        return found


def expected(request: EngineRequest) -> list[int]:
    count = request.stopping.max_tokens - (len(request.tokens) - request.num_prompt_tokens)
    return fake_generate(
        request.tokens,
        count,
        request.sampling,
        stop_token_ids=request.stopping.stop_token_ids,
        min_tokens=request.stopping.min_tokens,
    )


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


def transfer(desk: Desk, reserved: Reserved, tokens: list[int]) -> None:
    """What a transfer does: brings the KV of the missing tokens into the lent blocks."""
    slots = _slots(np.array(tokens, np.int32), np.arange(len(tokens), dtype=np.int32))
    for index, block in enumerate(reserved.block_ids):
        start = reserved.first_token + index * BLOCK
        part = slots[start : start + BLOCK]
        desk.runner.memory[block, :, :, :, : len(part)] = part.transpose(1, 2, 3, 0, 4)


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


class Owner:
    """Plays the decode worker: decides by draws, pulls, and lets late bytes land in what is quarantined."""

    def __init__(self, desk: Desk, draw: Any) -> None:
        self.desk = desk
        self.draw = draw
        self.seen = 0
        self.pulls: dict[str, Reserved] = {}  # being read
        self.gone: dict[str, Reserved] = {}  # ended while being read, not settled

    def react(self, requests: dict[str, EngineRequest]) -> None:
        told, self.seen = self.desk.told[self.seen :], len(self.desk.told)
        for output in told:
            match output:
                case Matched():
                    (self.desk.book.reserve if self.draw(st.booleans()) else self.desk.book.compute_locally)(output.id)
                case Reserved():
                    self.pulls[output.id] = output
                case Ended() if output.id in self.pulls:
                    self.gone[output.id] = self.pulls.pop(output.id)
                case ChunkComputed() if output.token is not None:
                    self.desk.book.release(output.id)
        for id in list(self.pulls):
            if self.draw(st.booleans()):
                self.end_pull(id, requests[id])
        for id, reserved in list(self.gone.items()):
            self.desk.runner.memory[list(reserved.block_ids)] = 0xDEAD
            if self.draw(st.booleans()):
                self.desk.pool.settle(id)
                del self.gone[id]

    def end_pull(self, id: str, request: EngineRequest) -> None:
        reserved = self.pulls.pop(id)
        if self.draw(st.booleans()):
            transfer(self.desk, reserved, request.tokens)
            first = fake_generate(request.tokens, 1, request.sampling)[0]
            self.desk.book.adopt(id, token=first, logprobs=None)
        else:
            self.gone[id] = reserved
            self.desk.book.compute_locally(id)

    def is_done(self) -> bool:
        return not (self.pulls or self.gone or self.seen < len(self.desk.told))


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "family": st.integers(0, 2),  # shared prefixes
            "length": st.integers(1, 30),
            "told": st.integers(0, 5),  # output of an earlier attempt
            "max_tokens": st.integers(1, 12),
            "mode": st.sampled_from(["generate", "generate", "remote", "prefill"]),
            "priority": st.integers(0, 1),
            "seed": st.none() | st.integers(0, 3),
            "at": st.integers(0, 12),
            "abort_at": st.none() | st.integers(0, 25),
        }
    ),
    min_size=1,
    max_size=9,
)


DESKS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(3, 24),
        "budget": st.integers(1, 24),
        "max_num_seqs": st.integers(1, 6),
        "caching": st.booleans(),
        "hash_unit": st.sampled_from([1, 2, 4]),
    }
)


@settings(max_examples=50, deadline=None)
@given(drafts=REQUESTS, shape=DESKS, data=st.data())
def test_any_load_ends_with_right_tokens_and_all_blocks_back(
    drafts: list[dict[str, Any]], shape: dict[str, Any], data: Any
) -> None:
    desk = Desk(**shape)
    owner = Owner(desk, data.draw)
    requests = {}
    for number, draft in enumerate(drafts):
        tokens = [1_000 * draft["family"] + i for i in range(draft["length"])]
        fields = {k: draft[k] for k in ("mode", "priority", "seed")}
        num_told = min(draft["told"], len(tokens) - 1)
        fields |= {"max_tokens": draft["max_tokens"] + num_told, "num_prompt_tokens": len(tokens) - num_told}
        requests[str(number)] = make_request(str(number), tokens, **fields)
    for now in range(2_000):
        for (id, request), draft in zip(requests.items(), drafts, strict=True):
            if draft["at"] == now:
                desk.submit(request)
            if draft["abort_at"] is not None and draft["abort_at"] == now - draft["at"]:
                desk.book.abort(id)
        plan = desk.step()
        owner.react(requests)
        if now > 40 and not plan and owner.is_done() and not len(desk.book.queues):
            break
    else:
        pytest.fail(f"stuck: {list(desk.book.queues)}")
    check_ends(desk, requests)


def check_ends(desk: Desk, requests: dict[str, EngineRequest]) -> None:
    assert desk.pool.num_free == desk.pool.num_blocks
    assert not desk.book.queues.computing
    for id, request in requests.items():
        ends = [o for o in desk.told if o.id == id and is_terminal(o)]
        capacity = desk.pool.num_blocks * BLOCK + 1 - len(request.tokens)
        oracle = expected(request)[: max(0, capacity)]
        if capacity <= 0:
            assert [type(e.error) for e in ends if isinstance(e, Ended)] == [Refused]
        elif request.mode == "prefill":
            assert len(ends) == 1
            assert getattr(ends[0], "token", oracle[0]) == oracle[0]
        else:
            assert len(ends) == 1
            told = desk.tokens(id)
            assert told == oracle[: len(told)]
            assert len(told) == len(oracle) or isinstance(ends[0], Ended)


def is_terminal(output: Output) -> bool:
    match output:
        case StepTokens():
            return output.finish is not None
        case ChunkComputed():
            return output.token is not None
        case _:
            return isinstance(output, Ended)
