"""The aggregated worker: prefills and generates by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from components import rules
from components.messages import GenerateRequest, TokenChunk, WorkerEvents, WorkerSnapshot
from components.options import WorkerOptions
from graph import Component, Context, GraphView, NodeView, Publishes, Serves

if TYPE_CHECKING:
    from components.serving import Serving


class Worker(Component):
    """One engine that does both phases."""

    Options = WorkerOptions
    compute = True
    requests = Serves(GenerateRequest, TokenChunk, required=True)
    events = Publishes(WorkerEvents, WorkerSnapshot)

    _serving: Serving | None = None

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """The block size fits the hash unit."""
        return (*rules.hash_unit_faults(node), *rules.rank_faults(node))

    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        """The hash unit that is the same all over the graph."""
        return rules.resolve_hash_unit(node, graph)

    @classmethod
    def patience_s(cls, node: NodeView) -> float:
        """Longer than its longest step."""
        return float(node.options["hang_timeout_s"])

    async def start(self, context: Context) -> None:
        """Loads the model; requests are served once this returns."""
        from components.serving import Serving

        self._serving = Serving(self.options, context, role="worker", events=Worker.events)
        await self._serving.start()
        context.serve(Worker.requests, self._serving.generate)

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
