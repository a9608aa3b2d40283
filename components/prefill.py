"""The prefill worker: computes prompts for decode workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from components import rules
from components.messages import PREFILL_REPLIES, PREFILL_REQUESTS, WorkerEvents, WorkerSnapshot
from components.options import DisaggOptions
from graph import Component, GraphView, NodeView, Publishes, Sends, Serves


class PrefillWorker(Component):
    """Computes prompts in chunks and pins their blocks until decode has pulled them."""

    Options = DisaggOptions
    requests = Serves(PREFILL_REQUESTS, PREFILL_REPLIES, required=True)
    kv = Sends("kv-blocks", required=True)
    events = Publishes(WorkerEvents, WorkerSnapshot)

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """The block size fits the hash unit."""
        return rules.hash_unit_faults(node)

    @classmethod
    def warnings(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """A missing transfer backend."""
        return rules.transceiver_warnings(node)

    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        """The hash unit that is the same all over the graph."""
        return rules.resolve_hash_unit(node, graph)
