"""The context: the only door through which a component reaches the world."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from prometheus_client import CollectorRegistry

from graph.child import log_failure
from graph.component import Client, Handler, Health, Publisher, Subscription
from graph.errors import LinkError
from graph.link import Links
from graph.ports import Calls, Message, Publishes, Serves, Subscribes
from graph.registry import (
    SUPERVISOR,
    CollectMetrics,
    Directory,
    Join,
    MetricsText,
    Noted,
    Report,
    State,
    supervisor_port,
)
from graph.spec import ReplicaSpec, links_of

log = logging.getLogger("headrace.replica")

_FOREVER_S = 1e8  # the directory's stream is silent while nothing changes
_REPORT_TIMEOUT_S = 10.0
_MIN_PROGRESS_GAP_S = 0.2


class ReplicaContext:
    """The `Context` of a replica process. `on_failure` is called once background work has failed."""

    def __init__(
        self,
        spec: ReplicaSpec,
        links: Links,
        *,
        loop: asyncio.AbstractEventLoop,
        metrics: CollectorRegistry,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.id = spec.id
        self.boot = spec.boot
        self.graph = spec.graph
        self.run_dir = Path(spec.run_dir)
        self.num_cores = spec.num_cores
        self.tp = spec.tp
        self.gpu_share = spec.gpu_share
        self.listener = None if spec.listener is None else socket.socket(fileno=spec.listener)
        self.metrics = metrics
        self.loop = loop
        self._targets = spec.targets
        self._links = links
        self._supervisor_peer = spec.supervisor
        self._on_failure = on_failure
        self._health = Health("down")
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.get_ident()
        self._last_progress = ("", 0.0)
        self._facts: dict[str, int] = {}
        self._is_closing = False
        self._version = -1
        self._versions: dict[asyncio.Future[None], int] = {}  # who waits for which
        supervisor = supervisor_port()
        calls = Calls(supervisor.requests, supervisor.replies)
        calls.name = supervisor.name
        self._links.set_peers([spec.supervisor])
        self._supervisor = self._links.client(calls, {spec.supervisor.node: supervisor.name})

    def serve(self, port: Serves, handler: Handler, *, max_streams: int = 100_000) -> None:
        """See `Context`."""
        self._links.serve(port, handler, max_streams=max_streams)

    def client(self, port: Calls) -> Client:
        """See `Context`."""
        return self._links.client(port, links_of(self._targets, port))

    def publisher(self, port: Publishes, snapshot: Callable[[], Message]) -> Publisher:
        """See `Context`."""
        return self._links.publisher(port, snapshot)

    def subscribe(self, port: Subscribes, subscription: Subscription) -> None:
        """See `Context`."""
        self._links.subscribe(port, subscription, links_of(self._targets, port))

    def progress(self, doing: str, fraction: float | None = None) -> None:
        """See `Context`. Any thread may call it; repeats within a moment are left out."""
        if threading.get_ident() != self._thread:
            self.loop.call_soon_threadsafe(self.progress, doing, fraction)
            return
        last, at = self._last_progress
        now = time.monotonic()
        if doing != last or now - at >= _MIN_PROGRESS_GAP_S:
            self._last_progress = (doing, now)
            self._tell(Report(self.boot, "starting", doing, fraction))

    def notice(self, text: str) -> None:
        """See `Context`."""
        self._tell(Report(self.boot, "ready", notice=text))

    def announce(self, **facts: int) -> None:
        """See `Context`."""
        self._facts |= facts

    def _tell(self, report: Report) -> None:
        self._supervisor.open(
            report, peer=SUPERVISOR, timeout_s=_REPORT_TIMEOUT_S, on_item=_ignore, on_end=_log_lost_report
        )

    def spawn(self, work: Awaitable[None], *, name: str) -> asyncio.Task[None]:
        """See `Context`."""
        task = self.loop.create_task(_finish(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def health(self) -> Health:
        """See `Context`."""
        return self._health

    async def collect_metrics(self, timeout_s: float) -> bytes:
        """See `Context`."""
        # The supervisor bounds its round by `timeout_s`; the margin is for the way there and back.
        text = await self._supervisor.call(CollectMetrics(timeout_s), peer=SUPERVISOR, timeout_s=timeout_s + 1)
        assert isinstance(text, MetricsText)
        return text.text

    def join(self) -> None:
        """Called once by the replica's main: follows the directory from now on."""
        self._supervisor.open(
            Join(self.boot),
            peer=SUPERVISOR,
            timeout_s=_FOREVER_S,
            on_item=self._on_directory,
            on_end=self._on_supervisor_lost,
        )

    async def report(self, state: State, doing: str = "") -> Noted:
        """Tells the supervisor this replica's state; returns when it has been noted."""
        report = Report(self.boot, state, doing, facts=self._facts)
        noted = await self._supervisor.call(report, peer=SUPERVISOR, timeout_s=_REPORT_TIMEOUT_S)
        assert isinstance(noted, Noted)
        return noted

    def wait_version(self, version: int) -> asyncio.Future[None]:
        """Resolves once this replica goes by that version of the directory, or a later one."""
        waiter: asyncio.Future[None] = self.loop.create_future()
        self._versions[waiter] = version
        waiter.add_done_callback(self._versions.pop)
        self._tell_version()
        return waiter

    async def close(self) -> None:
        """Ends all background work. The supervisor's line may go from now on."""
        self._is_closing = True
        for task in self._tasks:
            task.remove_done_callback(self._on_task_done)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def _on_directory(self, directory: Directory) -> None:
        self._health = directory.health
        others = [entry.peer() for entry in directory.replicas if entry.id != self.id]
        self._links.set_peers([self._supervisor_peer, *others])
        self._version = directory.version
        self._tell_version()

    def _tell_version(self) -> None:
        for waiter, version in self._versions.items():
            if version <= self._version and not waiter.done():
                waiter.set_result(None)

    def _on_supervisor_lost(self, error: LinkError | None) -> None:
        if not self._is_closing:
            self._on_failure(error or LinkError("the supervisor ended the directory's stream"))

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log_failure(log, f"background work {task.get_name()!r}", error)
            self._on_failure(error)


async def _finish(work: Awaitable[None]) -> None:
    await work


def _ignore(_: object) -> None:
    """A report's reply says nothing more than that it was taken."""


def _log_lost_report(error: LinkError | None) -> None:
    if error is not None:
        log.warning("a progress report was lost: %s", error)
