"""The decode worker: pulls prompts' KV blocks and generates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from components import rules
from components.messages import (
    PREFILL_REPLIES,
    PREFILL_REQUESTS,
    GenerateRequest,
    TokenChunk,
    WorkerEvents,
    WorkerSnapshot,
)
from components.options import DisaggOptions
from graph import Calls, Component, GraphView, NodeView, Publishes, Receives, Serves, option


class DecodeOptions(DisaggOptions, frozen=True, kw_only=True):
    """Options of the decode worker."""

    max_local_prefill_length: Annotated[int, option("uncached prompt tokens up to which it prefills itself")] = 16


class DecodeWorker(Component):
    """Takes requests first, asks prefill for what is missing, pulls it, generates."""

    Options = DecodeOptions
    requests = Serves(GenerateRequest, TokenChunk, required=True)
    prefill = Calls(PREFILL_REQUESTS, PREFILL_REPLIES, required=False)
    kv = Receives("kv-blocks")
    events = Publishes(WorkerEvents, WorkerSnapshot)

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """The block size fits the hash unit, and every prefill worker can be pulled from."""
        return (*rules.hash_unit_faults(node), *rules.pull_faults(node, graph))

    @classmethod
    def warnings(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """A missing transfer backend."""
        return rules.transceiver_warnings(node)

    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        """The hash unit that is the same all over the graph."""
        return rules.resolve_hash_unit(node, graph)
