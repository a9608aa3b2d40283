"""The text processor: OpenAI semantics between raw HTTP bodies and token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from components import rules
from components.messages import GenerateRequest, Placement, PlacementRequest, TokenChunk
from components.options import DEFAULT_MODEL, ModelName
from frontends.messages import HttpBody, HttpHead, HttpRequest
from graph import Calls, Component, GraphView, NodeView, Options, Serves, option


class ProcessorOptions(Options, frozen=True, kw_only=True):
    """Options of the processor."""

    model: ModelName = DEFAULT_MODEL
    served_model_name: Annotated[str | None, option("name in the API; unset: the model's")] = None
    hash_unit: Annotated[int, option("tokens per block hash; 0: the smallest block size in the graph")] = 0
    max_model_len: Annotated[int | None, option("longest sequence; unset: the smallest of the workers', else the model's")] = None


class Processor(Component):
    """Validates, templates, tokenizes, places, detokenizes, formats."""

    Options = ProcessorOptions
    requests = Serves(HttpRequest, (HttpHead, HttpBody), required=True)
    placement = Calls(PlacementRequest, Placement, required=False)
    tokens = Calls(GenerateRequest, TokenChunk)

    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        """The hash unit that is the same all over the graph."""
        return rules.resolve_hash_unit(node, graph)
