"""The engine: a thread that turns requests into steps of a runner.

Life of a sequence (all moves happen on the engine's thread, between steps):

    waiting    in the queue, by priority, then arrival, until there is room for all its tokens at
               once; one whose next block another sequence is just computing waits for that
    matched    mode "remote" only: its cached prefix is pinned, `Matched` was reported, and the
               owner decides: `compute_locally` -> waiting, or `reserve`
    reserving  waits for room for all missing blocks of the prompt at once -> reserved, `Reserved`
    reserved   its blocks are lent to the transfer until `adopt` -> running, `compute_locally`
               -> waiting (recompute), or abort; lent blocks of a sequence that left this state any
               other way than by `adopt` are quarantined until `settled`
    running    in the batch: chunks of its tokens first, then a token per step
    held       mode "prefill" only: prompt done, blocks pinned until `release`
    finished   blocks returned, in exactly one terminal output (finish, or `Ended` with an error)

A running sequence may be preempted (mode "prefill" apart, whose blocks are being read): its blocks
are freed, it waits again in its old place and is recomputed, prompt and output alike. A step that
fails ends its sequences; a second one in a row ends the engine.

    plan = schedule(...)                       pure: which sequences, how many tokens, who is preempted
    book.apply(plan)                           blocks returned, pinned, allocated
    step = runner.launch(assemble(...))        acts
    book.launched(plan.work)                   lengths
    book.landed(plan.work, step.wait())        tokens, hashes, outputs, events

A runner that overlaps gets step n + 1 while step n runs: the tokens that n is choosing are pending then,
fed to n + 1 by the runner itself. A sequence that n turns out to end is computed once too often; what
that writes into its blocks comes before any later step's writes, and `Reserved`, which lets a transfer
write, is told only when the step that ran meanwhile is over. A step of first tokens alone, behind which
nobody waits, lands before the next one is launched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from components.engine.batch import assemble
from components.engine.book import Book
from components.engine.chunk_budget import ChunkBudget
from components.engine.commands import Commands
from components.engine.outputs import EngineRequest, StepReport, StepStats
from components.engine.runner import Launched, Runner
from components.engine.scheduler import Work, schedule
from components.engine.sequence import Phase
from components.engine.sequence import Sequence as SequenceState
from components.kv.pool import BlockPool
from components.messages import Load, TokenLogprobs
from graph import LinkError, PeerFault, RequestCancelled

log = logging.getLogger(__name__)

_MAX_FAILURES_IN_A_ROW = 2


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs to know, all "auto" resolved."""

    hash_unit: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    enable_prefix_caching: bool = True
    itl_budget_s: float | None = None  # longest step that prompts may make of one with decodes


class _Airborne(msgspec.Struct, frozen=True):
    """A launched step with what is to be booked when it lands."""

    step: Launched
    work: tuple[Work, ...]
    started_s: float
    num_tokens: int


class Engine:
    """Thread-safe front of the engine's thread; commands are queued and carried out between steps."""

    def __init__(self, runner: Runner, config: EngineConfig, on_report: Callable[[StepReport], None]) -> None:
        """`on_report` is called on the engine's thread, whenever there is something to tell: after each
        step, and before one if commands or the plan brought something. The engine closes the runner.
        """
        self.runner = runner
        self.config = config
        self._on_report = on_report
        self._chunk_budget = ChunkBudget(config.max_num_seqs, config.max_num_batched_tokens, config.itl_budget_s)
        self._pool = BlockPool(runner.num_blocks)
        self._book = Book(
            self._pool,
            block_size=runner.layout.block_size,
            hash_unit=config.hash_unit if config.enable_prefix_caching else None,
            max_model_len=runner.max_model_len,
            max_waiting=config.max_waiting,
        )
        self._commands = Commands()
        self._holds: set[str] = set()
        self._failure: LinkError | None = None
        self._num_failures = 0  # failed steps in a row
        self._airborne: _Airborne | None = None  # the step that runs while the next is prepared
        self._landed_s = 0.0
        self._told = (Load(), 0)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def failure(self) -> LinkError | None:
        """Why the engine ended by itself; None while it works."""
        return self._failure

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence, by the model and the pool."""
        return self._book.max_length

    def start(self) -> None:
        """Starts the thread; called once."""
        self._thread.start()

    def stop(self) -> None:
        """Ends every sequence as cancelled, after the running step, and closes the runner. Blocks; idempotent."""
        if not self._commands.stop():
            return
        if self._thread.ident is not None:
            self._thread.join()
        self.runner.close()

    def submit(self, request: EngineRequest) -> None:
        """Queues a sequence, whose id no live one may have. Raises once the engine has failed or stopped."""
        if not self._commands.put(partial(self._book.submit, request)):
            raise self._failure or _stopping()

    def abort(self, id: str) -> None:
        """Ends the sequence in any state; idempotent, unknown ids are ignored."""
        self._commands.put(partial(self._book.abort, id))

    def compute_locally(self, id: str) -> None:
        """A matched, reserving or reserved sequence shall be computed here after all."""
        self._commands.put(partial(self._book.compute_locally, id))

    def reserve(self, id: str) -> None:
        """A matched sequence shall wait for room for the rest of its prompt."""
        self._commands.put(partial(self._book.reserve, id))

    def adopt(self, id: str, *, token: int, logprobs: TokenLogprobs | None) -> None:
        """All of the prompt's KV has arrived; `token` is the first output token, already chosen."""
        self._commands.put(partial(self._book.adopt, id, token=token, logprobs=logprobs))

    def settled(self, ids: Sequence[str]) -> None:
        """No byte will land any more in what was lent to these sequences."""
        self._commands.put(partial(self._settle, tuple(ids)))

    def hold(self, id: str) -> None:
        """Lets no step begin until `resume(id)`; who calls it bounds the wait. Commands are still carried out."""
        self._commands.put(partial(self._holds.add, id))

    def resume(self, id: str) -> None:
        """Undoes `hold`. Idempotent."""
        self._commands.put(partial(self._holds.discard, id))

    def release(self, id: str) -> None:
        """Unpins a held sequence; idempotent."""
        self._commands.put(partial(self._book.release, id))

    # --- the thread

    def _settle(self, ids: tuple[str, ...]) -> None:
        for id in ids:
            self._pool.settle(id)

    def _run(self) -> None:
        try:
            is_idle = True
            while self._commands.wait(only_if=is_idle) and self._failure is None:
                is_idle = not self._turn()
            self._land_last()
            self._end(self._failure or _stopping())
        except Exception as error:  # a fault of the engine itself: its books cannot be trusted any more
            log.exception("the engine failed")
            self._failure = PeerFault(f"the engine failed: {type(error).__name__}: {error}")
            self._commands.close()
            self._book.abandon(self._failure)
            self._commands.obey()
            self._report()

    def _turn(self) -> bool:
        """One round: commands, plan, step. False if there was nothing to do."""
        self._commands.obey()
        if self._holds:
            self._land_last()
            self._report()
            return False
        if self._airborne is not None and self._must_land_first:
            self._land_last()
            return True  # whoever has come meanwhile is in the next plan
        plan = schedule(self._book.queues, self._pool, self._chunk_budget.limits)
        self._book.apply(plan)
        before, is_lending = self._airborne, any(a.phase is Phase.RESERVED for a in plan.admitted)
        if before is None or not is_lending:
            self._report(can_wait=self.runner.is_overlapping)
        self._airborne = self._launch(plan.work) if plan.work else None
        if before is not None:
            self._land(before)
        if not self.runner.is_overlapping:
            self._land_last()
        elif before is None:
            self._report()
        return bool(plan) or before is not None

    @property
    def _must_land_first(self) -> bool:
        """Whether the step under way is to be over before the next is planned.

        Either the next one needs its tokens, or they are first tokens, all of them, and nobody waits: these are worth
        more than the device's gap while the next step is launched.
        """
        queues = self._book.queues
        if any(sequence.needs_tokens for sequence in queues.running):
            return True
        return not queues.waiting and all(s.num_pending and not s.is_told for s in queues.running)

    def _launch(self, work: tuple[Work, ...]) -> _Airborne | None:
        """Starts a plan's work; a failure ends the sequences it concerns."""
        started_s = time.monotonic()
        try:
            batch = assemble(work)
            step = self.runner.launch(batch)
        except Exception as error:
            self._fail_step([part.sequence for part in work], error)
            self._report()
            return None
        self._book.launched(work)
        return _Airborne(step, work, started_s, len(batch.input_ids))

    def _land_last(self) -> None:
        """Leaves no step under way."""
        airborne, self._airborne = self._airborne, None
        if airborne is not None:
            self._land(airborne)

    def _land(self, airborne: _Airborne) -> None:
        """Waits for a launched step and books it; a failure ends the sequences it concerns."""
        try:
            sampled = airborne.step.wait()
        except Exception as error:
            failed, fed = airborne, self._airborne  # the step under way was fed by the one that failed
            self._airborne = None
            self._fail_step([part.sequence for part in (*failed.work, *(fed.work if fed else ()))], error)
        else:
            self._num_failures = 0
            self._book.landed(airborne.work, sampled)
        stats = self._stats(airborne)
        if not self._num_failures:
            self._chunk_budget.landed(airborne.work, stats.duration_s)
        self._report(stats)

    def _stats(self, airborne: _Airborne) -> StepStats:
        started_s, self._landed_s = max(airborne.started_s, self._landed_s), time.monotonic()
        return StepStats(
            duration_s=self._landed_s - started_s,
            num_sequences=len(airborne.work),
            num_tokens=airborne.num_tokens,
            cached_blocks=self._pool.num_cached,
            preemptions=self._book.num_preemptions,
            prompt_tokens=self._book.num_prompt_tokens,
            cached_tokens=self._book.num_cached_tokens,
            generated_tokens=self._book.num_generated_tokens,
        )

    def _fail_step(self, sequences: list[SequenceState], error: Exception) -> None:
        log.error("a step of %d sequences failed", len(sequences), exc_info=error)
        fault = PeerFault(f"the model failed: {type(error).__name__}: {error}")
        for sequence in sequences:
            if self._book.is_live(sequence):
                self._book.fail(sequence, fault)
        self._num_failures += 1
        if self._num_failures >= _MAX_FAILURES_IN_A_ROW:
            self._failure = PeerFault(f"the engine gave up after {self._num_failures} failed steps: {fault.message}")

    def _report(self, stats: StepStats | None = None, *, can_wait: bool = False) -> None:
        """Tells what there is to tell; a change of the load alone `can_wait` until a step has been launched."""
        outputs, events = self._book.take_outputs(), self._pool.take_events()
        if can_wait and not outputs and not events:
            return
        state = self._book.load(), self._pool.num_quarantined
        if outputs or events or stats is not None or state != self._told:
            self._told = state
            self._on_report(StepReport(outputs, events, *state, stats))

    def _end(self, error: LinkError) -> None:
        """The last thing the thread does: every sequence still ends, in its one terminal output."""
        self._commands.close()
        self._commands.obey()
        for sequence in self._book.queues:
            self._book.fail(sequence, error)
        self._report()


def _stopping() -> RequestCancelled:
    return RequestCancelled("the worker is stopping")
