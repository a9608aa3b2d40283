"""The chunk budget: prompts beside decodes stay within the budget, whatever a step's time depends on."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest
from desk import make_request

from components.decode import DecodeOptions
from components.engine.chunk_budget import ChunkBudget
from components.engine.engine import Engine, EngineConfig
from components.engine.fake import FakeRunner, fake_generate
from components.engine.outputs import StepReport, StepTokens
from components.engine.runner import Batch, Launched
from components.engine.scheduler import Work
from components.engine.sequence import Sequence
from components.messages import Sampling
from components.options import DisaggOptions, FakeEngine, WorkerOptions

BUDGET_S = 0.020
MOST = 8_192


def work(num_decodes: int, num_prompt_tokens: int) -> list[Work]:
    sequence = Sequence(make_request("a", [1]), arrival=0, block_size=16, hash_unit=None, max_length=100)
    decodes = [Work(sequence, 0, 1, 0, True)] * num_decodes
    return [*decodes, Work(sequence, 0, num_prompt_tokens, 0, False)] if num_prompt_tokens else decodes


COSTS: dict[str, Callable[[int], float]] = {  # of a step with 32 decodes and so many prompt tokens, in seconds
    "each token the same": lambda n: 0.005 + n * 26e-6,
    "free at first": lambda n: max(0.005, n * 26e-6),
    "slow": lambda n: 0.008 + n * 1e-3,
}


def chunk_of(budget: ChunkBudget) -> int:
    return budget.limits.max_prompt_tokens


@pytest.mark.parametrize("name", COSTS)
def test_steps_come_to_fill_the_budget(name: str) -> None:
    cost, budget = COSTS[name], ChunkBudget(256, MOST, BUDGET_S)
    for _ in range(5):
        budget.landed(work(32, 0), cost(0))
    took = []
    for _ in range(40):
        tokens = chunk_of(budget)
        took.append(cost(tokens))
        budget.landed(work(32, tokens), took[-1])
    settled = took[10:]
    least = cost(32)  # so many tokens are computed whatever the budget
    assert max(settled) <= max(1.1 * BUDGET_S, least)
    assert min(settled) >= min(0.8 * BUDGET_S, least)


def test_a_budget_that_decodes_alone_pass_still_gives_prompts_half_as_much_time() -> None:
    budget = ChunkBudget(256, MOST, BUDGET_S)
    cost = lambda tokens: 0.030 + tokens * 26e-6  # noqa: E731
    for _ in range(30):
        budget.landed(work(32, 0), cost(0))
        budget.landed(work(32, chunk_of(budget)), cost(chunk_of(budget)))
    assert chunk_of(budget) == pytest.approx(0.015 / 26e-6, rel=0.1)


def test_one_slow_step_is_soon_forgotten() -> None:
    cost, budget = COSTS["each token the same"], ChunkBudget(256, MOST, BUDGET_S)
    budget.landed(work(32, 0), cost(0))
    for _ in range(20):
        budget.landed(work(32, chunk_of(budget)), cost(chunk_of(budget)))
    settled = chunk_of(budget)
    budget.landed(work(32, 0), 0.3)
    budget.landed(work(32, chunk_of(budget)), 0.3)
    for _ in range(8):
        budget.landed(work(32, chunk_of(budget)), cost(chunk_of(budget)))
    assert chunk_of(budget) == pytest.approx(settled, rel=0.1)


def test_small_chunks_and_prompts_alone_say_little_about_large_chunks_beside_decodes() -> None:
    cost, budget = COSTS["free at first"], ChunkBudget(256, MOST, BUDGET_S)
    for _ in range(20):
        budget.landed(work(32, chunk_of(budget)), cost(chunk_of(budget)))
    settled = chunk_of(budget)
    budget.landed(work(0, 8_000), cost(8_000))
    for _ in range(60):
        budget.landed(work(32, 0), cost(0))
        budget.landed(work(32, 16), cost(16))
    assert chunk_of(budget) == settled
    assert cost(settled) <= 1.1 * BUDGET_S


def test_no_budget_bounds_nothing() -> None:
    budget = ChunkBudget(256, MOST, None)
    budget.landed(work(1, 4_000), 3.0)
    assert chunk_of(budget) == MOST


# --- through the engine


class Counted(FakeRunner):
    """Notes each step's decodes and prompt tokens."""

    def __init__(self) -> None:
        speed = FakeEngine(step_ms=2.0, token_ms=0.1)
        super().__init__(num_blocks=400, block_size=16, speed=speed, is_overlapping=True)
        self.steps: list[tuple[int, int]] = []

    def launch(self, batch: Batch) -> Launched:
        sizes = [int(b - a) for a, b in zip(batch.cu_seqlens_q, batch.cu_seqlens_q[1:], strict=False)]
        self.steps.append((sizes.count(1), sum(size for size in sizes if size > 1)))
        return super().launch(batch)


def test_a_long_prompt_is_cut_beside_decodes_only() -> None:
    runner, reports = Counted(), queue.SimpleQueue[StepReport]()
    config = EngineConfig(
        hash_unit=16, max_num_seqs=8, max_num_batched_tokens=2_048, max_waiting=10, itl_budget_s=BUDGET_S
    )
    engine = Engine(runner, config, reports.put)
    engine.start()
    prompts = {"short": list(range(300, 340)), "long": list(range(5_000, 7_000))}
    found = {"short": list[int](), "long": list[int]()}
    try:
        engine.submit(make_request("short", prompts["short"], max_tokens=60))
        ended: set[str] = set()
        while len(ended) < 2:
            for output in reports.get(timeout=30).outputs:
                assert isinstance(output, StepTokens)
                found[output.id] += output.tokens
                if output.id == "short" and len(found["short"]) == 5:
                    engine.submit(make_request("long", prompts["long"], max_tokens=60))
                if output.finish:
                    ended.add(output.id)
    finally:
        engine.stop()
    for id, tokens in found.items():
        assert tokens == fake_generate(prompts[id], 60, Sampling(temperature=0.0))
    beside = [tokens for decodes, tokens in runner.steps if decodes and tokens]
    assert sum(beside) == len(prompts["long"])
    assert max(beside) <= 256  # (20 - 2) / 0.1 = 180 once known
    assert min(beside[2:-1]) > 60


def test_unset_means_a_budget_on_the_gpu_of_decode_alone() -> None:
    kinds: tuple[type[WorkerOptions], ...] = (WorkerOptions, DisaggOptions, DecodeOptions)
    assert [kind().itl_budget_ms for kind in kinds] == [None] * 3
    assert [kind.gpu_itl_budget_ms for kind in kinds] == [None, None, 20.0]
