"""The engine's thread: commands, reports, idling, failures, and the end of everything."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from components.engine.engine import Engine, EngineConfig
from components.engine.fake import FakeRunner, fake_generate
from components.engine.outputs import (
    ChunkComputed,
    Ended,
    EngineRequest,
    Matched,
    Output,
    Reserved,
    StepReport,
    StepTokens,
)
from components.engine.runner import Batch, Sampled
from components.messages import BlocksStored, Load, Sampling, Stopping
from components.options import FakeEngine
from graph import PeerFault, Refused, RequestCancelled

GREEDY = Sampling(temperature=0.0)
WAIT_S = 10.0


def make_request(id: str, num_tokens: int, *, max_tokens: int = 4, **fields: Any) -> EngineRequest:
    return EngineRequest(
        id=id,
        tokens=list(range(500, 500 + num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=GREEDY,
        stopping=Stopping(max_tokens=max_tokens),
        **fields,
    )


class Brittle(FakeRunner):
    """Fails the steps whose numbers are in `failing`. A test may close the gate, and open it step by step."""

    def __init__(self) -> None:
        super().__init__(num_blocks=64, speed=FakeEngine(step_ms=1, token_ms=0))
        self.failing: tuple[int, ...] = ()
        self.num_steps = 0
        self.is_closed = False
        self.gate = threading.Event()
        self.gate.set()
        self.is_single = False  # the gate closes behind each step
        self.entered = threading.Event()

    def execute(self, batch: Batch) -> Sampled:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        if self.is_single:
            self.gate.clear()
        self.num_steps += 1
        if self.num_steps in self.failing:
            raise MemoryError("out of it")
        return super().execute(batch)

    def close(self) -> None:
        self.is_closed = True


class Listener:
    """Collects reports; waits for what a test is after."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self._queue: queue.Queue[StepReport] = queue.Queue()

    def __call__(self, report: StepReport) -> None:
        self._queue.put(report)

    def until(self, *ids: str) -> None:
        """Returns when each of these has ended."""
        while not all(self.end(id) for id in ids):
            self.next()

    def until_output(self, id: str, kind: type[Output]) -> None:
        """Returns when the sequence has such an output."""
        while not any(isinstance(output, kind) for output in self.of(id)):
            self.next()

    def next(self) -> None:
        """Takes in one more report."""
        self.reports.append(self._queue.get(timeout=WAIT_S))

    def of(self, id: str) -> list[Output]:
        return [o for r in self.reports for o in r.outputs if o.id == id]

    def end(self, id: str) -> Output | None:
        for output in self.of(id):
            if isinstance(output, Ended) or (isinstance(output, StepTokens) and output.finish):
                return output
            if isinstance(output, ChunkComputed) and output.token is not None:
                return output
        return None

    def error(self, id: str) -> Exception:
        end = self.end(id)
        assert isinstance(end, Ended)
        return end.error

    def tokens(self, id: str) -> list[int]:
        return [t for o in self.of(id) if isinstance(o, StepTokens) for t in o.tokens]


@pytest.fixture
def told() -> Listener:
    return Listener()


@pytest.fixture
def runner() -> Brittle:
    return Brittle()


@pytest.fixture
def engine(runner: Brittle, told: Listener) -> Iterator[Engine]:
    config = EngineConfig(hash_unit=16, max_num_seqs=8, max_num_batched_tokens=64, max_waiting=100)
    engine = Engine(runner, config, told)
    engine.start()
    yield engine
    runner.gate.set()
    engine.stop()
    assert runner.is_closed


def test_requests_come_out_right_with_events_load_and_stats(engine: Engine, told: Listener) -> None:
    for i in range(5):
        engine.submit(make_request(str(i), 33 + i, max_tokens=10))
    told.until(*"01234")
    for i in range(5):
        assert told.tokens(str(i)) == fake_generate(range(500, 533 + i), 10, GREEDY)
    assert any(isinstance(e, BlocksStored) for r in told.reports for e in r.events)
    assert told.reports[-1].load == Load(blocks_total=64)
    stats = told.reports[-1].stats
    assert stats is not None
    assert stats.generated_tokens == 50
    assert stats.prompt_tokens == 33 + 34 + 35 + 36 + 37
    assert stats.cached_tokens > 0


def test_an_idle_engine_sleeps(engine: Engine, told: Listener) -> None:
    engine.submit(make_request("a", 5))
    told.until("a")
    before_s = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before_s < 0.05


def test_refusals_need_no_step(engine: Engine, runner: Brittle, told: Listener) -> None:
    engine.submit(make_request("long", 64 * 16 + 1))
    told.until("long")
    assert isinstance(told.error("long"), Refused)
    assert runner.num_steps == 0


def test_an_abort_ends_a_running_and_a_waiting_one_and_no_other(
    engine: Engine, runner: Brittle, told: Listener
) -> None:
    runner.gate.clear()
    for id in ("run", "other"):
        engine.submit(make_request(id, 20, max_tokens=30))
    engine.abort("run")
    engine.abort("never heard of")
    engine.abort("run")
    runner.gate.set()
    told.until("run", "other")
    assert isinstance(told.error("run"), RequestCancelled)
    assert told.tokens("other") == fake_generate(range(500, 520), 30, GREEDY)
    assert len([o for o in told.of("run") if isinstance(o, Ended)]) == 1


def test_a_failed_step_ends_its_sequences_and_the_engine_goes_on(
    engine: Engine, runner: Brittle, told: Listener
) -> None:
    runner.failing = (2,)
    engine.submit(make_request("a", 20))
    told.until("a")
    error = told.error("a")
    assert isinstance(error, PeerFault)
    assert "MemoryError: out of it" in str(error)
    engine.submit(make_request("b", 20))
    told.until("b")
    assert told.tokens("b") == fake_generate(range(500, 520), 4, GREEDY)
    assert engine.failure is None
    assert told.reports[-1].load.blocks_used == 0


def test_two_failed_steps_in_a_row_end_the_engine_loudly(
    engine: Engine, runner: Brittle, told: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="components.engine.engine")
    runner.failing = (1, 2)
    runner.gate.clear()
    engine.submit(make_request("a", 200))
    engine.submit(make_request("b", 200, priority=-1))
    engine.submit(make_request("c", 200, priority=-2))
    runner.gate.set()
    told.until("a", "b", "c")
    for id in "abc":
        assert isinstance(told.error(id), PeerFault)
    assert "2 failed steps" in str(engine.failure)
    with pytest.raises(PeerFault, match="gave up"):
        engine.submit(make_request("d", 5))
    assert [r.levelname for r in caplog.records] == ["ERROR", "ERROR"]


def test_a_fault_of_the_engine_itself_still_ends_every_sequence(
    engine: Engine, runner: Brittle, told: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="components.engine.engine")
    runner.gate.clear()
    engine.submit(make_request("a", 20))
    assert runner.entered.wait(WAIT_S)
    engine.submit(make_request("a", 20))  # an id that is live: the caller broke its promise
    engine.submit(make_request("behind", 20))
    runner.gate.set()
    told.until("a", "behind")
    assert isinstance(told.error("a"), PeerFault)
    assert isinstance(told.error("behind"), PeerFault)
    assert "live already" in str(engine.failure)
    with pytest.raises(PeerFault):
        engine.submit(make_request("b", 5))


def test_quarantine_is_told_when_it_begins_and_when_it_ends(engine: Engine, told: Listener) -> None:
    engine.submit(make_request("r", 40, mode="remote"))
    told.until_output("r", Matched)
    engine.reserve("r")
    told.until_output("r", Reserved)
    engine.abort("r")
    told.until("r")
    assert told.reports[-1].quarantined_blocks == 3
    engine.settled(["r"])
    told.next()
    assert told.reports[-1].quarantined_blocks == 0


def test_stopping_ends_every_sequence_as_cancelled(engine: Engine, runner: Brittle, told: Listener) -> None:
    engine.submit(make_request("run", 20, max_tokens=900))
    engine.submit(make_request("remote", 40, mode="remote"))
    engine.submit(make_request("held", 5, mode="prefill", priority=-1))
    told.until("held")
    engine.stop()
    told.until("run", "remote")
    for id in ("run", "remote"):
        assert isinstance(told.error(id), RequestCancelled)
    assert told.reports[-1].load.blocks_used == 0
    with pytest.raises(RequestCancelled, match="stopping"):
        engine.submit(make_request("late", 5))


def test_a_command_is_answered_before_a_long_step_and_not_behind_it(
    engine: Engine, runner: Brittle, told: Listener
) -> None:
    runner.is_single = True
    runner.gate.clear()
    engine.submit(make_request("slow", 20))
    assert runner.entered.wait(WAIT_S)
    engine.submit(make_request("long", 64 * 16 + 1))
    runner.gate.set()  # one step; the next one hangs, but what the command brought is told before it
    told.until("long")
    assert isinstance(told.error("long"), Refused)
    assert runner.num_steps == 1
    runner.is_single = False
