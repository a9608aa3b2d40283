"""Overlapping steps: the same tokens as one by one, whatever ends, waits or is preempted meanwhile."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from components.engine.engine import Engine, EngineConfig
from components.engine.fake import FakeRunner, fake_generate
from components.engine.outputs import ChunkComputed, Ended, EngineRequest, Output, Reserved, StepReport, StepTokens
from components.engine.runner import Batch, Launched, Sampled
from components.messages import Sampling, Stopping
from components.options import FakeEngine

WAIT_S = 30
GREEDY = Sampling(temperature=0.0)


class Watched(FakeRunner):
    """Notes how many steps are under way, and when each is over."""

    def __init__(self, num_blocks: int = 64, step_ms: float = 1.0) -> None:
        super().__init__(
            num_blocks=num_blocks, block_size=4, speed=FakeEngine(step_ms=step_ms, token_ms=0), is_overlapping=True
        )
        self.under_way = 0
        self.under_way_at_launch: list[int] = []  # the launched one included
        self.fed: list[int] = []  # per step: inputs that were not known when it was launched
        self.num_sequences: list[int] = []  # per step
        self.failing_waits: set[int] = set()
        self.meanwhile: dict[int, Callable[[], None]] = {}  # by step: what happens while it is waited for

    def launch(self, batch: Batch) -> Launched:
        self.under_way += 1
        self.under_way_at_launch.append(self.under_way)
        assert batch.feeds is not None
        assert ((batch.input_ids >= 0) | (batch.feeds >= 0)).all(), "an input is neither known nor fed"
        self.fed.append(int((batch.feeds >= 0).sum()))
        self.num_sequences.append(batch.num_sequences)
        return _Step(self, super().launch(batch), len(self.fed))


class _Step:
    def __init__(self, runner: Watched, step: Launched, number: int) -> None:
        self._runner, self._step, self._number = runner, step, number

    def wait(self) -> Sampled:
        self._runner.meanwhile.get(self._number, lambda: None)()
        sampled = self._step.wait()
        self._runner.under_way -= 1
        if self._number in self._runner.failing_waits:
            raise MemoryError("out of it")
        return sampled


class Scene:
    """An engine over a watched runner, and what it told."""

    def __init__(self, runner: Watched, **config: int) -> None:
        self.runner = runner
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_waiting": 50, **config}
        self._reports: queue.Queue[StepReport] = queue.Queue()
        self.engine = Engine(runner, EngineConfig(hash_unit=4, **limits), self._reports.put)
        self.outputs: list[Output] = []

    def submit(self, id: str, prompt: list[int], sampling: Sampling = GREEDY, **stopping: object) -> None:
        self.engine.submit(
            EngineRequest(
                id=id,
                tokens=prompt,
                num_prompt_tokens=len(prompt),
                sampling=sampling,
                stopping=Stopping(**{"max_tokens": 12, **stopping}),  # type: ignore[arg-type]
            )
        )

    def until_ended(self, *ids: str) -> None:
        while not all(self.end(id) for id in ids):
            self.outputs += self._reports.get(timeout=WAIT_S).outputs

    def end(self, id: str) -> Output | None:
        ends = [o for o in self.outputs if o.id == id and (isinstance(o, Ended) or getattr(o, "finish", None))]
        assert len(ends) <= 1, f"{id} ended twice"
        return ends[0] if ends else None

    def tokens(self, id: str) -> list[int]:
        return [t for o in self.outputs if isinstance(o, StepTokens) and o.id == id for t in o.tokens]

    def until(self, id: str, kind: type[Output]) -> Output:
        while not (found := [o for o in self.outputs if o.id == id and isinstance(o, kind)]):
            self.outputs += self._reports.get(timeout=WAIT_S).outputs
        return found[0]


def prompts(count: int) -> dict[str, list[int]]:
    random = np.random.default_rng(3)
    return {str(i): random.integers(300, 900, 3 + 5 * i).tolist() for i in range(count)}


def run(scene: Scene, requests: dict[str, list[int]], sampling: Sampling = GREEDY, **stopping: object) -> None:
    for id, prompt in requests.items():
        scene.submit(id, prompt, sampling, **stopping)
    scene.engine.start()
    scene.until_ended(*requests)
    scene.engine.stop()


def test_steps_overlap_and_change_no_token() -> None:
    scene, requests = Scene(Watched()), prompts(5)
    run(scene, requests)
    for id, prompt in requests.items():
        assert scene.tokens(id) == fake_generate(prompt, 12, GREEDY)
    assert max(scene.runner.under_way_at_launch) == 2
    assert sum(scene.runner.fed) > 0


def test_a_first_token_does_not_wait_for_the_launch_of_the_next_step() -> None:
    scene = Scene(Watched())
    run(scene, {"a": [5] * 10}, max_tokens=4)
    assert scene.runner.under_way_at_launch == [1, 1, 2, 2]


def test_who_comes_while_a_first_token_is_computed_is_in_the_next_step() -> None:
    scene = Scene(Watched())
    scene.runner.meanwhile[1] = lambda: scene.submit("b", [6] * 5)
    scene.submit("a", [5] * 5)
    scene.engine.start()
    scene.until_ended("a", "b")
    scene.engine.stop()
    assert scene.runner.num_sequences[:2] == [1, 2]


@pytest.mark.parametrize("lengths", [(40,), (10, 10)], ids=["own chunks", "another's prompt"])
def test_steps_overlap_while_prompts_are_computed(lengths: tuple[int, ...]) -> None:
    scene = Scene(Watched())
    run(scene, {str(length + i): [300 + i] * length for i, length in enumerate(lengths)}, max_tokens=4)
    assert scene.runner.under_way_at_launch[1] == 2


def test_a_change_of_the_load_alone_is_told_behind_the_launch() -> None:
    scene, under_way = Scene(Watched()), list[int]()
    report = scene.engine._on_report

    def note(report_: StepReport) -> None:
        under_way.append(scene.runner.under_way)
        report(report_)

    scene.engine._on_report = note
    run(scene, {"a": [5] * 10}, max_tokens=1)
    assert under_way[0] == 1


def test_a_stop_token_ends_a_sequence_that_the_next_step_has_already() -> None:
    scene, requests = Scene(Watched()), prompts(4)
    stops = {id: fake_generate(prompt, 6, GREEDY)[-1] for id, prompt in requests.items()}
    for id, prompt in requests.items():
        scene.submit(id, prompt, stop_token_ids=(stops[id],))
    scene.engine.start()
    scene.until_ended(*requests)
    scene.submit("later", [7, 8, 9] * 8)  # into blocks that trailing steps wrote to
    scene.until_ended("later")
    scene.engine.stop()
    for id, prompt in requests.items():
        assert scene.tokens(id) == fake_generate(prompt, 12, GREEDY, stop_token_ids=(stops[id],))
    assert scene.tokens("later") == fake_generate([7, 8, 9] * 8, 12, GREEDY)


def test_preempted_sequences_go_on_with_the_same_tokens() -> None:
    scene, requests = Scene(Watched(num_blocks=12)), prompts(4)
    run(scene, requests)
    assert scene.engine._book.num_preemptions > 0
    for id, prompt in requests.items():
        assert scene.tokens(id) == fake_generate(prompt, 12, GREEDY)


def test_penalties_wait_for_the_tokens_they_count() -> None:
    scene, sampling = Scene(Watched()), Sampling(temperature=0.0, frequency_penalty=0.5)
    run(scene, prompts(3), sampling)
    assert sum(scene.runner.fed) == 0
    assert max(scene.runner.under_way_at_launch) == 1


def test_a_step_that_fails_takes_the_one_fed_by_it_along() -> None:
    scene, requests = Scene(Watched()), prompts(2)
    scene.runner.failing_waits = {3}
    run(scene, requests)
    assert all(isinstance(scene.end(id), Ended) for id in requests)
    assert scene.engine.failure is None


def test_an_abort_between_launch_and_landing_ends_once() -> None:
    scene = Scene(Watched(step_ms=20))
    scene.submit("a", [5, 6, 7], max_tokens=1_000)
    scene.engine.start()
    scene.until("a", StepTokens)
    scene.engine.abort("a")
    scene.until_ended("a")
    scene.submit("b", [5, 6, 7])
    scene.until_ended("b")
    scene.engine.stop()
    assert scene.tokens("b") == fake_generate([5, 6, 7], 12, GREEDY)


@pytest.mark.parametrize("length", [5, 16, 40])
def test_chunks_are_told_when_they_are_computed(length: int) -> None:
    scene, prompt = Scene(Watched()), list(range(300, 300 + length))
    scene.engine.submit(
        EngineRequest(
            id="p",
            tokens=prompt,
            num_prompt_tokens=length,
            sampling=GREEDY,
            stopping=Stopping(max_tokens=9),
            mode="prefill",
        )
    )
    scene.engine.start()
    while not any(isinstance(o, ChunkComputed) and o.token is not None for o in scene.outputs):
        scene.outputs += scene._reports.get(timeout=WAIT_S).outputs
    scene.engine.stop()
    chunks = [o for o in scene.outputs if isinstance(o, ChunkComputed)]
    assert [c.num_tokens for c in chunks] == [min(length, 16 * (i + 1)) for i in range(-(-length // 16))]
    assert chunks[-1].token == fake_generate(prompt, 1, GREEDY)[0]


def test_blocks_are_lent_only_when_no_step_can_write_into_them_any_more() -> None:
    runner = Watched(step_ms=30)
    scene = Scene(runner)
    scene.submit("a", [5, 6, 7], max_tokens=1_000)
    scene.engine.start()
    scene.until("a", StepTokens)
    launched: list[tuple[float, int]] = []
    lent = threading.Event()
    report = scene.engine._on_report

    def note(report_: StepReport) -> None:
        if any(isinstance(o, Reserved) for o in report_.outputs):
            launched.append((time.monotonic(), runner.under_way))
            lent.set()
        report(report_)

    scene.engine._on_report = note
    scene.engine.submit(
        EngineRequest(
            id="r", tokens=[1] * 9, num_prompt_tokens=9, sampling=GREEDY, stopping=Stopping(max_tokens=3), mode="remote"
        )
    )
    scene.engine.abort("a")  # its blocks are free, and a step under way still writes into one of them
    scene.engine.reserve("r")
    while not lent.is_set():
        scene.engine.reserve("r")
        time.sleep(0.005)
    scene.engine.stop()
    assert launched[0][1] == 0  # the step that ran when the blocks were chosen is over
