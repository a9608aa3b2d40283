"""What engine workers have in common: what a graph's check asks of them, and the life cycle around their engine.

An `EngineWorker` has an engine; an `ExchangeWorker` is one end of a KV transfer as well. Declaring one
loads neither: engine and transfer back end are imported in `start`, inside the worker's process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from components import rules
from components.messages import Role, WorkerEvents, WorkerSnapshot
from components.options import DisaggOptions, WorkerOptions
from graph import Component, Context, GraphView, NodeView, Publishes

if TYPE_CHECKING:
    from components.exchange import Exchange
    from components.serving import Serving, Watcher
    from components.transfer.agent import LocalRegion, TransferAgent


class EngineWorker(Component):
    """One engine. Subclasses declare what they serve, and serve it once `start_engine` has returned."""

    Options = WorkerOptions
    compute = True
    role: ClassVar[Role] = "worker"
    events = Publishes(WorkerEvents, WorkerSnapshot)

    _serving: Serving | None = None

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """The block size fits the hash unit, and the engine can be divided among the ranks."""
        return (*rules.hash_unit_faults(node), *rules.rank_faults(node))

    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        """The hash unit that is the same all over the graph."""
        return rules.resolve_hash_unit(node, graph)

    @classmethod
    def patience_s(cls, node: NodeView) -> float:
        """Longer than its longest step."""
        return float(node.options["hang_timeout_s"])

    async def start_engine(self, context: Context, watcher: Watcher | None = None) -> Serving:
        """Loads the model and starts the engine; called first in `start`."""
        from components.serving import Serving

        self._serving = Serving(self.options, context, role=self.role, events=type(self).events, watcher=watcher)
        await self._serving.start()
        return self._serving

    async def drain(self) -> None:
        """Returns when the running requests are done."""
        if self._serving is not None:
            await self._serving.drain()

    async def stop(self) -> None:
        """Ends what still runs and frees the engine."""
        if self._serving is not None:
            await self._serving.stop()

    async def alive(self) -> None:
        """Returns when the engine has computed a token."""
        if self._serving is not None:
            await self._serving.alive()


class ExchangeWorker(EngineWorker):
    """One end of a KV transfer: an engine whose pool is registered with a transfer back end, if one is set."""

    Options = DisaggOptions

    _exchange: Exchange | None = None

    @classmethod
    def warnings(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """A missing transfer back end."""
        return rules.transceiver_warnings(node)

    async def start_exchange(self, context: Context, watcher: Watcher) -> tuple[Serving, Exchange | None]:
        """Starts the engine, then registers its pool; called first in `start`."""
        from components.exchange import open_exchange

        serving = await self.start_engine(context, watcher)
        self._exchange = await open_exchange(self.options, context, serving, self.make_agent)
        return serving, self._exchange

    def make_agent(self, region: LocalRegion) -> TransferAgent:
        """The agent over this worker's pool; called on the thread that will drive it."""
        from components.exchange import make_agent

        return make_agent(self.options, region)

    async def stop(self) -> None:
        """Frees the agents, then the engine."""
        if self._exchange is not None:
            await self._exchange.drivers.close()
        await super().stop()

    async def alive(self) -> None:
        """Returns when the engine has computed a token and the transfer thread has made a turn."""
        await super().alive()
        if self._exchange is not None:
            await self._exchange.drivers.alive()
