"""The `graph serve` process: from a resolved graph to its clean end.

bind      the public sockets, before anything else
claim     a run directory with a unique name
start     every replica, with progress on the screen; one that fails ends it all
serve     until the first Ctrl-C, SIGTERM, SIGHUP or `graph stop`
drain     callers first; a second signal stops at once
clean     kill what is left, wait for it, remove the run directory
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping

from rich.console import Console
from rich.logging import RichHandler

from graph.control import serve_control
from graph.declare import GraphView
from graph.launcher import LocalLauncher
from graph.listeners import url_of
from graph.managed import Managed
from graph.progress import Progress
from graph.resources import this_machine
from graph.rundir import RunDir, RunningGraph, base_dir
from graph.supervisor import Supervisor

STOPPED_AT_ONCE = 130
"""Exit status after a second signal."""

_PROGRESS_TICK_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """How often the end was asked for: once drains, twice stops at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.stop = asyncio.Event()

    def ask(self) -> None:
        """Called for each signal and for `graph stop`."""
        (self.stop if self.drain.is_set() else self.drain).set()


def run_graph(
    view: GraphView, listeners: Mapping[str, socket.socket], console: Console, on_ready: Callable[[RunDir], None]
) -> int:
    """Serves `view` until its end and returns the exit status. `on_ready` is called once, when all replicas are.

    Signals wait until `_Serving` can take them; those that come after its end count no more.
    """
    _log_to(console)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    run_dir = RunDir.claim(base_dir(os.environ), view.name)
    try:
        return asyncio.run(_serve(view, run_dir, listeners, console, on_ready))
    finally:
        run_dir.remove()


async def _serve(
    view: GraphView,
    run_dir: RunDir,
    listeners: Mapping[str, socket.socket],
    console: Console,
    on_ready: Callable[[RunDir], None],
) -> int:
    return await _Serving(view, run_dir, listeners, console).run(on_ready)


class _Serving:
    """One run of one graph, on the running event loop."""

    def __init__(
        self, view: GraphView, run_dir: RunDir, listeners: Mapping[str, socket.socket], console: Console
    ) -> None:
        self._console = console
        self._run_dir = run_dir
        self._began = time.monotonic()
        self._ending = Ending()
        self._progress = Progress(console)
        self._supervisor = Supervisor(
            view,
            run_dir,
            launcher=LocalLauncher(),
            machine=this_machine(os.environ),
            listeners=listeners,
            environment=os.environ,
            on_change=self._show,
        )
        self._supervisor.url = url_of(listeners)

    async def run(self, on_ready: Callable[[RunDir], None]) -> int:
        """The whole life; all replicas are dead when it returns or raises."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._ending.ask)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        supervisor = self._supervisor
        serve_control(supervisor, self._ending.drain.set)
        self._run_dir.announce(
            RunningGraph(self._run_dir.name, os.getpid(), supervisor.view.file, supervisor.peer, supervisor.url)
        )
        watch = asyncio.create_task(supervisor.watch())
        try:
            failed = await self._start()
            if failed:
                self._report(failed)
                return 1
            if not self._ending.drain.is_set():
                took_s = time.monotonic() - self._began
                self._say(f"{self._run_dir.name} is ready after {took_s:.1f} s: {supervisor.url or ''}")
                on_ready(self._run_dir)
            await self._ending.drain.wait()
            return await self._drain()
        finally:
            watch.cancel()
            await supervisor.close()
            signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the loop's end takes the handlers away

    async def _start(self) -> list[Managed]:
        """Starts all replicas; returns those that failed. Ends early when the end is asked for."""
        with self._progress:
            self._supervisor.start()
            started = asyncio.create_task(self._supervisor.started())
            ticks = asyncio.create_task(self._tick())
            await _first(started, self._ending.drain.wait())
            ticks.cancel()
            self._show()
        return started.result() if started.done() and not started.cancelled() else []

    async def _drain(self) -> int:
        self._say("draining; Ctrl-C again stops at once")
        drained = asyncio.create_task(self._supervisor.stop())
        await _first(drained, self._ending.stop.wait())
        if drained.done() and not drained.cancelled():
            drained.result()
            self._say("stopped")
            return 0
        return STOPPED_AT_ONCE

    def _report(self, failed: list[Managed]) -> None:
        for managed in failed:
            self._say(managed.failure)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_TICK_S)
            self._show()

    def _show(self) -> None:
        self._progress.update(self._supervisor.status())

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


async def _first(task: asyncio.Task[object], other: Awaitable[object]) -> None:
    """Waits for either; whichever is not done is cancelled and has ended on return."""
    second = asyncio.ensure_future(other)
    await asyncio.wait([task, second], return_when=asyncio.FIRST_COMPLETED)
    for pending in (task, second):
        pending.cancel()
    await asyncio.gather(task, second, return_exceptions=True)


def _log_to(console: Console) -> None:
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, markup=False)
    else:  # whole lines, whatever their length
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
