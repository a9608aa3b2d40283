"""The pace: prompts beside decodes stay within the budget, whatever a step's time depends on."""

from __future__ import annotations

import queue
from collections.abc import Callable

import pytest
from desk import make_request

from components.decode import DecodeOptions
from components.engine.engine import Engine, EngineConfig
from components.engine.fake import FakeRunner, fake_generate
from components.engine.outputs import StepReport, StepTokens
from components.engine.pace import Pace
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


@pytest.mark.parametrize("name", COSTS)
def test_steps_come_to_fill_the_budget_and_do_not_pass_it_twice_as_far(name: str) -> None:
    cost, pace = COSTS[name], Pace(256, MOST, BUDGET_S)
    for _ in range(5):
        pace.landed(work(32, 0), cost(0))
    took = []
    for _ in range(40):
        tokens = pace.limits.max_prompt_tokens
        took.append(cost(tokens))
        pace.landed(work(32, tokens), took[-1])
    settled = took[10:]
    least = cost(32)  # so many tokens are computed whatever the budget
    assert max(settled) <= max(1.1 * BUDGET_S, least)
    assert min(settled) >= min(0.8 * BUDGET_S, least)


def test_a_budget_that_decodes_alone_pass_leaves_prompts_the_least() -> None:
    pace = Pace(256, MOST, BUDGET_S)
    pace.landed(work(32, 0), 0.030)
    pace.landed(work(32, 200), 0.040)
    assert pace.limits.max_prompt_tokens == 32


def test_small_chunks_say_little_about_large_ones() -> None:
    pace = Pace(256, MOST, BUDGET_S)
    pace.landed(work(32, 0), 0.005)
    pace.landed(work(32, 40), 0.005)  # hidden behind the weights' time
    assert pace.limits.max_prompt_tokens == 256


def test_no_budget_bounds_nothing() -> None:
    pace = Pace(256, MOST, None)
    pace.landed(work(1, 4_000), 3.0)
    assert pace.limits.max_prompt_tokens == MOST


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
