"""The hang watch: asks every replica again and again whether it works, and kills what does not.

    silent     its event loop did not answer within `LOOP_PATIENCE_S` (a stopped process, a blocked loop):
               noticed at most `PING_INTERVAL_S` + `LOOP_PATIENCE_S` after it fell silent
    stuck      the loop answers, but `Component.alive` did not return within the component's patience, or
               raised: noticed at most `WORK_INTERVAL_S` + that patience after the last work

Killed means reaped: nobody hears of the end before the process can write nothing any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from graph.declare import NodeView
from graph.errors import DeadlineExceeded, PeerFault
from graph.managed import Managed
from graph.replica_port import LOOP_PATIENCE_S, Replicas

PING_INTERVAL_S = 2.0
WORK_INTERVAL_S = 10.0


class HangWatch:
    """Watches the replicas of one graph."""

    def __init__(self, replicas: Replicas, nodes: Mapping[str, NodeView]) -> None:
        self._replicas = replicas
        self._nodes = nodes
        self._checking: set[str] = set()  # boots
        self._worked_at: dict[str, float] = {}  # by boot: when work was last seen
        self.num_hangs = dict.fromkeys(nodes, 0)

    async def run(self, replicas: Mapping[str, Managed]) -> None:
        """Runs as long as the graph. `replicas` may change meanwhile."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(PING_INTERVAL_S)
                self._forget({managed.boot for managed in replicas.values()})
                for managed in self._due(replicas.values()):
                    self._checking.add(managed.boot)
                    group.create_task(self._check(managed, managed.boot))

    def _due(self, replicas: Iterable[Managed]) -> list[Managed]:
        return [m for m in replicas if m.state in ("ready", "draining") and m.boot not in self._checking]

    async def _check(self, managed: Managed, boot: str) -> None:
        try:
            why = await self._fault(managed, boot)
        finally:
            self._checking.discard(boot)
        if why is not None and managed.end_hung(boot, why):
            self.num_hangs[managed.node] += 1

    async def _fault(self, managed: Managed, boot: str) -> str | None:
        """What is wrong with the replica, in words."""
        if await self._replicas.is_silent(managed.id):
            return f"hung: its event loop did not answer within {LOOP_PATIENCE_S:g} s"
        if managed.state != "ready" or time.monotonic() - self._worked_at.get(boot, 0.0) < WORK_INTERVAL_S:
            return None
        node = self._nodes[managed.node]
        patience_s = node.component.patience_s(node)
        error = await self._replicas.check_work(managed.id, patience_s)
        if isinstance(error, DeadlineExceeded):
            return f"hung: no work got done within {patience_s:g} s"
        if isinstance(error, PeerFault) and managed.state == "ready":
            return f"sick: {error.message}"
        self._worked_at[boot] = time.monotonic()
        return None

    def _forget(self, boots: set[str]) -> None:
        self._worked_at = {boot: at for boot, at in self._worked_at.items() if boot in boots}
