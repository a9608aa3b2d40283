"""The aggregated worker: prefills and generates by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from components import rules
from components.messages import GenerateRequest, TokenChunk, WorkerEvents, WorkerSnapshot
from components.options import WorkerOptions
from graph import Component, GraphView, NodeView, Publishes, Serves


class Worker(Component):
    """One engine that does both phases."""

    Options = WorkerOptions
    requests = Serves(GenerateRequest, TokenChunk, required=True)
    events = Publishes(WorkerEvents, WorkerSnapshot)

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """The block size fits the hash unit."""
        return rules.hash_unit_faults(node)

    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        """The hash unit that is the same all over the graph."""
        return rules.resolve_hash_unit(node, graph)
