"""Any mix of requests, cancels and transfers, with every token held against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from desk import BLOCK, Desk, expected, make_request, transfer
from hypothesis import given, settings
from hypothesis import strategies as st

from components.engine.fake import fake_generate
from components.engine.outputs import ChunkComputed, Ended, EngineRequest, Matched, Output, Reserved, StepTokens
from graph import Refused


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
