"""One replica as its supervisor keeps it: started, watched, buried, started again.

starting -> ready -> draining -> stopped     see `graph.registry` for the states
starting | ready -> (dead) -> stopped -> starting    after a pause that grows
ready -> draining -> (dead) -> stopped -> starting   when someone else sent the process SIGTERM
starting -> failed                            when it failed to start too often
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from graph.errors import LaunchError
from graph.launcher import Exit, LocalProcess, log_tail
from graph.policy import DRAIN_TIMEOUT_S, KILL_MARGIN_S, Backoff
from graph.registry import Entry, Registry, Report, State
from graph.rundir import socket_path

log = logging.getLogger("headrace.supervisor")

Start = Callable[["Managed", str, Path], LocalProcess]
"""Starts the process of a replica, given its new boot id and its socket's path."""


class Managed:
    """A desired replica. `run` keeps it alive until `leave`; `on_change` hears of every change of state."""

    def __init__(
        self, id: str, *, run_dir: Path, log_file: Path, registry: Registry, start: Start, on_change: Callable[[], None]
    ) -> None:
        self.id = id
        self.node = id.partition("/")[0]
        self.index = int(id.rpartition("/")[2])
        self.state: State = "starting"
        self.since_s = time.time()  # of the present state
        self.started_s = time.time()  # of the present process
        self.doing = ""
        self.fraction: float | None = None
        self.notice = ""  # what its present process wants an operator to see
        self.reason = ""  # why it died last
        self.last_words = ""  # the end of its log, once it failed without saying why
        self.boot = ""
        self.process: LocalProcess | None = None
        self.num_restarts = 0
        self.start_s: float | None = None  # how long the present process took to become ready
        self.facts: dict[str, int] = {}  # what its present process announced
        self.gpus: tuple[str, ...] = ()
        self.is_over = False  # `run` has returned
        self.log_file = log_file
        self._run_dir = run_dir
        self._registry = registry
        self._start = start
        self._on_change = on_change
        self._ready_at: float | None = None
        self._verdict = ""  # why we killed the present process
        self._confession = ""  # why the present process ends, in its own words
        self._drain_until: float | None = None
        self._leaving = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Returns when the replica has left or failed; its process is dead then."""
        try:
            await self._live()
        except Exception as error:  # a fault of ours must show as this replica's, not as a silent gap
            log.exception("%s cannot be kept", self.id)
            self.reason = f"internal error: {error!r}"
            self._move("failed", doing=self.reason)
        finally:
            self.is_over = True
            self._changed.set()

    async def _live(self) -> None:
        backoff = Backoff()
        while not self._leaving.is_set():
            end = await self._one_life()
            if self._leaving.is_set():
                break
            ready_s = None if self._ready_at is None else time.monotonic() - self._ready_at
            delay_s = backoff.next_delay_s(ready_s)
            self.reason = self._why(end, ready_s)
            log.warning(
                "%s died: %s; %s", self.id, self.reason, "given up" if delay_s is None else f"again in {delay_s} s"
            )
            if delay_s is None:
                self.last_words = "" if self._confession else log_tail(self.log_file)
                self._move("failed", doing=self.reason)
                return
            self._move("stopped", doing=f"{self.reason}; starts again in {delay_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), delay_s)
            self.num_restarts += 1
        self._move("stopped")

    def _why(self, end: Exit | LaunchError, ready_s: float | None) -> str:
        """Why the process died; `ready_s` is how long it was ready, None if it never was."""
        if self._confession and ready_s is None:
            return self._confession
        how = self._confession or (f"{self._verdict}; {end}" if self._verdict else str(end))
        return f"{how} {'before it was ready' if ready_s is None else f'after {ready_s:.0f} s of service'}"

    async def _one_life(self) -> Exit | LaunchError:
        """Starts a process and returns when it is dead, reaped and withdrawn."""
        self.boot = uuid.uuid4().hex[:8]
        self._ready_at = self._drain_until = self.start_s = None
        self._verdict = self._confession = ""
        self.notice, self.facts = "", {}
        self.started_s = time.time()
        path = socket_path(self._run_dir, self.id, self.boot)
        try:
            self.process = self._start(self, self.boot, path)
        except LaunchError as error:
            self._confession = str(error)
            return error
        self._move("starting", doing="loading")
        end = await self.process.wait()
        self.process = None
        self._registry.withdraw(self.id, self.boot)
        path.unlink(missing_ok=True)
        return end

    def take(self, report: Report) -> None:
        """Books what the replica says of itself; words of an earlier process count for nothing."""
        if report.boot != self.boot or self.process is None or self.state == "draining":
            return
        if report.notice:
            self.notice = report.notice
            self._on_change()
        elif report.state == "failed":
            self._confession = report.doing
        elif report.state == "draining":
            self._drain_until = time.monotonic() + DRAIN_TIMEOUT_S
            self._move("draining", doing="someone sent it SIGTERM")
        elif report.state == "ready" and self.state != "ready":
            self._ready_at, self.facts = time.monotonic(), report.facts
            self.start_s = time.time() - self.started_s
            self._move("ready")
        elif self.state == "starting":
            self.doing, self.fraction = report.doing, report.fraction
            self._on_change()

    async def leave(self, timeout_s: float) -> None:
        """Withdraws the replica, lets it finish its work, and returns when it is dead.

        What it has not finished after `timeout_s` it hands over or ends in an error; it is killed if it does
        not leave then.
        """
        self._leaving.set()
        process = self.process
        if process is None:
            return
        self._drain_until = time.monotonic() + timeout_s
        self._move("draining", doing=f"for at most {timeout_s:.0f} s")
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout_s + KILL_MARGIN_S)
        except TimeoutError:
            log.warning("%s did not leave within %.0f s and is killed", self.id, timeout_s + KILL_MARGIN_S)
            process.kill()
            await process.wait()

    @property
    def is_leaving(self) -> bool:
        """Whether it was asked to leave for good."""
        return self._leaving.is_set()

    @property
    def drain_left_s(self) -> float:
        """How long its running work may still take."""
        return DRAIN_TIMEOUT_S if self._drain_until is None else max(0.0, self._drain_until - time.monotonic())

    def end_hung(self, boot: str, why: str) -> bool:
        """Kills the process of that boot, which does no work any more; False if it is gone already."""
        if self.process is None or self.boot != boot:
            return False
        log.warning("%s is killed: %s", self.id, why)
        self._verdict = why
        self.process.kill()
        return True

    def kill(self) -> None:
        """Ends the process at once and for good."""
        self._leaving.set()
        if self.process is not None:
            self.process.kill()

    async def until(self, *states: State) -> State:
        """Waits until the replica is in one of `states`, or its life is over; returns the state."""
        while self.state not in states and not self.is_over:
            self._changed.clear()
            await self._changed.wait()
        return self.state

    @property
    def failure(self) -> str:
        """What an operator is shown of a replica that failed: why, with the end of its log if it did not say it."""
        return failure(self.id, self.reason, self.last_words)

    def _move(self, state: State, doing: str = "") -> None:
        self.state, self.doing, self.fraction, self.since_s = state, doing, None, time.time()
        if self.process is not None:
            address = f"ipc://{socket_path(self._run_dir, self.id, self.boot)}"
            self._registry.put(Entry(self.id, self.boot, address, state, self.facts))
        self._changed.set()
        self._on_change()


def failure(id: str, reason: str, last_words: str) -> str:
    """Why a replica failed; the end of its log follows, where there is one to show."""
    return f"{id} failed: {reason}" + (f"; the last lines of its log:\n{last_words}" if last_words else "")
