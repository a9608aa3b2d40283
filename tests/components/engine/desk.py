"""`Desk`: the engine without its thread, and builders, for the tests of the scheduler and the books."""

from __future__ import annotations

from typing import Any

import numpy as np

from components.engine.batch import assemble
from components.engine.book import Book
from components.engine.fake import FakeRunner, _slots, fake_generate
from components.engine.outputs import EngineRequest, Output, Reserved, StepTokens
from components.engine.scheduler import Limits, Plan, schedule
from components.engine.sequence import Sequence
from components.kv.pool import BlockPool
from components.messages import Sampling, Stopping
from components.options import FakeEngine

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
        self.limits = Limits(max_num_seqs, budget, budget)
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
            self.book.launched(plan.work)
            self.book.landed(plan.work, self.runner.execute(batch))
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
        self.pool.verify(s.blocks for s in self.book.queues)
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


def transfer(desk: Desk, reserved: Reserved, tokens: list[int]) -> None:
    """What a transfer does: brings the KV of the missing tokens into the lent blocks."""
    slots = _slots(np.array(tokens, np.int32), np.arange(len(tokens), dtype=np.int32))
    for index, block in enumerate(reserved.block_ids):
        start = reserved.first_token + index * BLOCK
        part = slots[start : start + BLOCK]
        desk.runner.memory[block, :, :, :, : len(part)] = part.transpose(1, 2, 3, 0, 4)
