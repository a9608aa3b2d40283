"""The replica's process: one component, from its start to its end.

    told       the spec arrives on standard input; the component's module is imported
    starting   the component starts; progress goes to the supervisor
    ready      it serves, until SIGTERM (a planned end) or a failure
    draining   no new work arrives; the running work is finished, or handed over when the time is up
    stopped    everything is freed; exit status 0 after a planned end, else 1

The process never outlives its parent: the kernel kills it when the parent dies, and the end of
standard input says so as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from graph.child import die_with_parent, end_with_pipe, log_failure, read_line, set_title
from graph.component import Component
from graph.context import ReplicaContext
from graph.errors import GraphError, LinkError
from graph.link import Links, ZeroMQ
from graph.loader import import_component
from graph.replica_port import serve_replica_port
from graph.resources import raise_file_limit
from graph.spec import ReplicaSpec

log = logging.getLogger("headrace.replica")

_STOP_TIMEOUT_S = 10.0


def main() -> int:
    """Entry point of `python -m graph.replica`."""
    die_with_parent()
    spec = msgspec.json.decode(read_line(), type=ReplicaSpec)
    if os.getppid() != spec.parent_pid:  # it died before the kernel was asked to tell
        return 1
    set_title(spec.title)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise_file_limit()
    log.info("%s boot %s starts, pid %d", spec.id, spec.boot, os.getpid())
    try:
        component_class = import_component(spec.component)
        component = component_class(msgspec.convert(spec.options, component_class.Options))
    except GraphError as error:
        log_failure(log, spec.id, error)
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(Replica(spec, component)))
    return 1


async def _run(replica: Replica) -> None:
    """Never returns: threads that still load a model, or wait in foreign code, must not hold the process."""
    code = await replica.run()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Replica:
    """Runs one component through its life."""

    def __init__(self, spec: ReplicaSpec, component: Component) -> None:
        self._spec = spec
        self._component = component
        self._leave = asyncio.Event()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()

    async def run(self) -> int:
        """Returns the process's exit status."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leave.set)
        end_with_pipe(loop)
        metrics = CollectorRegistry()
        links = Links(self._spec.id, self._spec.boot, transport=ZeroMQ(), listen=self._spec.address)
        context = ReplicaContext(self._spec, links, loop=loop, metrics=metrics, on_failure=self._fail)
        serve_replica_port(links, self._component, metrics, context.wait_version)
        try:
            context.join()
            await self._live(context)
        except Exception as error:  # the component's own; the supervisor shows what it says, else the log
            log_failure(log, self._spec.id, error)
            await _tell(context, error)
            self._fail(error)
        finally:
            await self._close(context, links)
        return 0 if self._failure is None else 1

    async def _live(self, context: ReplicaContext) -> None:
        context.progress("starting")
        if not await self._unless(self._component.start(context), self._leave):
            return
        gc.collect()
        gc.freeze()  # what start-up made stays; collections need not walk it again
        await context.report("ready")
        log.info("%s is ready", self._spec.id)
        await self._unless(self._leave.wait())
        log.info("%s drains", self._spec.id)
        await self._unless(self._drain(context))

    async def _drain(self, context: ReplicaContext) -> None:
        """Returns when the running work is done, or its time is up; `stop` ends what is left then."""
        limit_s = (await context.report("draining")).drain_s
        try:
            async with asyncio.timeout(limit_s) as scope:
                await self._component.drain()
        except TimeoutError:
            if not scope.expired():
                raise
            log.warning("%s has not finished its work within %.0f s", self._spec.id, limit_s)

    async def _unless(self, work: Coroutine[Any, Any, Any], *others: asyncio.Event) -> bool:
        """Does `work`; whether it finished before any of `others`. A failure elsewhere ends it and is raised."""
        events = [asyncio.create_task(event.wait()) for event in (self._failed, *others)]
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, *events], return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            if task.done():
                await task
            return task.done()
        finally:
            for pending in (task, *events):
                pending.cancel()
            await asyncio.gather(task, *events, return_exceptions=True)

    async def _close(self, context: ReplicaContext, links: Links) -> None:
        try:
            await asyncio.wait_for(self._component.stop(), _STOP_TIMEOUT_S)
        except Exception as error:  # must not keep the links from being closed
            log_failure(log, f"the stop of {self._spec.id}", error)
            self._fail(error)
        await context.close()
        await links.close()

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._failed.set()


async def _tell(context: ReplicaContext, error: Exception) -> None:
    """Tells the supervisor why the replica ends, where the error's own words are enough."""
    if isinstance(error, GraphError) and not isinstance(error, LinkError):
        with contextlib.suppress(LinkError):  # it sees the exit status in any case
            await context.report("failed", str(error))


if __name__ == "__main__":
    sys.exit(main())
