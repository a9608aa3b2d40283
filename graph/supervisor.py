"""The supervisor: keeps a graph's replicas as its desired counts say.

It owns their processes, their directory and their resources. Commands change the desired counts;
`policy` decides what that means, each `Managed` replica acts, the registry books who is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from socket import socket
from typing import Literal

from graph.component import Health, Peer
from graph.declare import GraphView
from graph.errors import DeclarationError, LaunchError
from graph.hangs import HangWatch
from graph.launcher import LocalLauncher, bound_log
from graph.link import Links, ZeroMQ
from graph.managed import Managed
from graph.metrics import merge
from graph.policy import DRAIN_TIMEOUT_S, drain_order, free_indexes, plan_scale, split_replica, surplus
from graph.registry import SUPERVISOR, Directory, LocalRegistry
from graph.replica_port import Replicas
from graph.resources import Machine
from graph.rundir import RunDir, log_path, socket_path
from graph.starter import Starter
from graph.status import GraphStatus, graph_families, node_status
from graph.words import counted

log = logging.getLogger("headrace.supervisor")

MAX_LOG_BYTES = 8 << 20
_LOG_CHECK_S = 30.0

Phase = Literal["starting", "serving", "draining"]


class Supervisor:
    """Starts, scales, restarts and ends the replicas of one graph. Main thread's event loop only."""

    def __init__(
        self,
        view: GraphView,
        run_dir: RunDir,
        *,
        launcher: LocalLauncher,
        machine: Machine,
        listeners: Mapping[str, socket],
        environment: Mapping[str, str],
        on_change: Callable[[], None],
    ) -> None:
        self.view = view
        self.phase: Phase = "starting"
        self.url: str | None = None
        self.replicas: dict[str, Managed] = {}
        self.desired = {name: node.replicas for name, node in view.nodes.items()}
        self.registry = LocalRegistry(view)
        self._run_dir = run_dir
        self._num_cores = machine.num_cores
        self._listeners = listeners
        self._on_change = on_change
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unwaited: set[asyncio.Task[None]] = set()  # of commands that nobody waits for
        self._commands = asyncio.Lock()
        boot = uuid.uuid4().hex[:8]
        address = f"ipc://{socket_path(run_dir.path, SUPERVISOR, boot)}"
        self.peer = Peer(SUPERVISOR, boot, address)
        self.links = Links(SUPERVISOR, boot, transport=ZeroMQ(), listen=address)
        self._starter = Starter(
            view,
            run_dir,
            launcher=launcher,
            machine=machine,
            listeners=listeners,
            environment=environment,
            desired=self.desired,
            supervisor=self.peer,
        )
        self.gpus = self._starter.gpus
        self._asked = Replicas(self.links, view.nodes)
        self._hangs = HangWatch(self._asked, view.nodes)

    # Life

    def start(self) -> None:
        """Starts every desired replica; returns at once."""
        self.registry.watch(self._on_directory)
        for node, count in self.desired.items():
            for index in range(count):
                self._add(node, index)

    async def started(self) -> list[Managed]:
        """Waits until every replica is ready, or one has failed; returns those that failed."""
        waits = [asyncio.ensure_future(m.until("ready", "failed")) for m in self.replicas.values()]
        try:
            for done in asyncio.as_completed(waits):
                if await done == "failed":
                    break
        finally:
            for wait in waits:
                wait.cancel()
        failed = [m for m in self.replicas.values() if m.state == "failed"]
        if not failed and self.phase == "starting":
            self.phase = "serving"
            self._on_change()
        return failed

    async def stop(self) -> None:
        """Drains the whole graph, callers before those they call, within one bounded time."""
        self.phase = "draining"
        for listener in self._listeners.values():
            listener.close()  # replicas have their own; who comes when they are gone is refused
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        groups = [[m for m in self.replicas.values() if m.state != "ready"]]
        groups += [[m for m in self.replicas.values() if m.node in nodes] for nodes in drain_order(self.view)]
        for group in groups:
            await asyncio.gather(*(m.leave(max(0.0, deadline - time.monotonic())) for m in group))

    async def close(self) -> None:
        """Kills what still runs, waits until it is dead, and closes the links."""
        for managed in self.replicas.values():
            managed.kill()
        await asyncio.gather(*self._tasks.values())
        await self.links.close()

    async def watch(self) -> None:
        """Runs as long as the graph: kills replicas that hang, keeps the logs from filling the disk."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._hangs.run(self.replicas))
            group.create_task(self._bound_logs())

    async def _bound_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOG_CHECK_S)
            for file in sorted((self._run_dir.path / "logs").glob("*.log")):
                bound_log(file, MAX_LOG_BYTES)

    # Commands

    async def scale(self, targets: Sequence[str], tell: Callable[[str], None], *, wait: bool) -> None:
        """Carries out `graph scale`; raises `DeclarationError` before anything is touched."""
        async with self._command():
            counts = plan_scale(self.view, self.desired, targets, self.gpus.num_gpus, self._num_cores)
            staying = {node: self._staying(node) for node in counts}
            removed = [m for node, count in counts.items() for m in surplus(staying[node], count)]
            missing = {node: max(0, count - len(staying[node])) for node, count in counts.items()}
            self.desired |= counts
            tell(f"starting {counted(sum(missing.values()), 'replica')}, draining {len(removed)}")
            tasks = [asyncio.create_task(self._remove(m, tell)) for m in removed]
            if any(missing[node] and self.view.nodes[node].gpus for node in counts):
                await self._gpus_free(tell)
            for node, number in missing.items():
                indexes = free_indexes((m.index for m in self._of(node)), number)
                tasks += [asyncio.create_task(_tell_ready(self._add(node, index), tell)) for index in indexes]
            if wait:
                await asyncio.gather(*tasks)
            else:
                self._background(tasks)

    async def restart(self, target: str, tell: Callable[[str], None]) -> None:
        """Carries out `graph restart`: one replica after the other, each ready before the next leaves."""
        async with self._command():
            for managed in self._chosen(target, "restart"):
                await self._remove(managed, tell)
                await _tell_ready(self._add(managed.node, managed.index), tell)

    async def drain(self, target: str, tell: Callable[[str], None]) -> None:
        """Carries out `graph drain`: the replica leaves and is not replaced."""
        async with self._command():
            if "/" not in target:
                raise DeclarationError(f"name one replica, such as '{target}/0'")
            for managed in self._chosen(target, "drain"):
                self.desired[managed.node] -= 1
                await self._remove(managed, tell)

    @contextlib.asynccontextmanager
    async def _command(self) -> AsyncIterator[None]:
        """One command at a time, and none once the graph is ending."""
        async with self._commands:
            if self.phase == "draining":
                raise LaunchError("the graph is ending")
            yield

    # What others ask

    def status(self) -> GraphStatus:
        """The graph as it is now."""
        nodes = {node: node_status(desired, self._of(node)) for node, desired in self.desired.items()}
        state = self.health.state if self.phase == "serving" else self.phase
        return GraphStatus(self._run_dir.name, state, self.url, nodes)

    @property
    def health(self) -> Health:
        """The graph's health as the registry has it."""
        return self.registry.directory.health

    async def collect_metrics(self, timeout_s: float) -> bytes:
        """All replicas' metrics, and the supervisor's own; who does not answer in time is left out."""
        families = await self._asked.families(self._serving_ids(), timeout_s)
        return merge(graph_families(self.status(), self._hangs.num_hangs), families)

    async def all_seen(self) -> None:
        """Returns when every replica that sends requests goes by the directory as it is now; bounded."""
        await self._asked.see(self.registry.directory.version, self._serving_ids())

    def _serving_ids(self) -> list[str]:
        return [m.id for m in self.replicas.values() if m.state in ("ready", "draining")]

    # Replicas

    def _of(self, node: str) -> list[Managed]:
        return [m for m in self.replicas.values() if m.node == node]

    def _staying(self, node: str) -> list[Managed]:
        return [m for m in self._of(node) if not m.is_leaving]

    def _chosen(self, target: str, command: str) -> list[Managed]:
        node, index = split_replica(self.view, target)
        staying = self._staying(node)
        if not staying:
            raise DeclarationError(f"node {node!r} has no replicas to {command}; graph scale {node}=1 starts one")
        chosen = [m for m in staying if index in (None, m.index)]
        if not chosen:
            raise DeclarationError(f"no replica {target!r}; the node has {', '.join(m.id for m in staying)}")
        return chosen

    def _add(self, node: str, index: int) -> Managed:
        id = f"{node}/{index}"
        managed = Managed(
            id,
            run_dir=self._run_dir.path,
            log_file=log_path(self._run_dir.path, id),
            registry=self.registry,
            start=self._starter.start,
            on_change=self._on_change,
        )
        self.replicas[id] = managed
        self._tasks[id] = asyncio.create_task(managed.run(), name=id)
        return managed

    async def _gpus_free(self, tell: Callable[[str], None]) -> None:
        """Waits for those that leave, where what stays and what comes does not fit beside them."""
        nodes = self.view.nodes
        leaving = [m for m in self.replicas.values() if m.is_leaving]
        held = sum(nodes[m.node].gpus * nodes[m.node].tp for m in leaving)
        wanted = sum(node.gpus * node.tp * self.desired[name] for name, node in nodes.items())
        if self.gpus.num_gpus and held + wanted > self.gpus.num_gpus:
            tell("waiting for the GPUs of those that leave")
            await asyncio.gather(*(m.until() for m in leaving))
            for managed in leaving:
                self.gpus.give_back(managed.id)

    async def _remove(self, managed: Managed, tell: Callable[[str], None]) -> None:
        began = time.monotonic()
        await managed.leave(DRAIN_TIMEOUT_S)
        await self._tasks.pop(managed.id)
        self.gpus.give_back(managed.id)
        del self.replicas[managed.id]
        tell(f"{managed.id} left after {time.monotonic() - began:.1f} s")

    def _on_directory(self, directory: Directory) -> None:
        self.links.set_peers([entry.peer() for entry in directory.replicas])

    def _background(self, tasks: list[asyncio.Task[None]]) -> None:
        self._unwaited.update(tasks)
        for task in tasks:
            task.add_done_callback(self._unwaited_done)

    def _unwaited_done(self, task: asyncio.Task[None]) -> None:
        self._unwaited.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a command nobody waited for failed: %s", error)


async def _tell_ready(managed: Managed, tell: Callable[[str], None]) -> None:
    began = time.monotonic()
    if await managed.until("ready", "failed") == "ready":
        tell(f"{managed.id} ready after {time.monotonic() - began:.1f} s")
    elif managed.state == "failed":
        raise LaunchError(managed.failure)
