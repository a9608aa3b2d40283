"""What a graph of engine workers must satisfy; pure functions that the components' hooks call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from components.messages import GenerateRequest, PrefillRequest
from graph import GraphView, Message, NodeView, Serves
from graph.declare import ports_of

DISABLED = "Disaggregated serving is not enabled, please check the configuration"
"""How a disaggregated request ends on a worker without a transfer backend."""

DISABLED_CODE = "disaggregation_disabled"
"""The code of that refusal."""


def resolve_hash_unit(node: NodeView, graph: GraphView) -> Mapping[str, object]:
    """The graph-wide hash unit, the smallest block size, for a node that left it at 0."""
    sizes = [n.options["block_size"] for n in graph.nodes.values() if "block_size" in n.options]
    return {"hash_unit": min(sizes)} if sizes and not node.options["hash_unit"] else {}


def hash_unit_faults(node: NodeView) -> Iterable[str]:
    """A worker hashes whole units, so its blocks must hold a whole number of them."""
    size, unit = node.options["block_size"], node.options["hash_unit"]
    if unit and size % unit:
        yield (
            f"node '{node.name}': block_size {size} is no multiple of hash_unit {unit}; "
            f"leave hash_unit at 0, or set {node.name}.hash_unit to a divisor of every block size"
        )


def rank_faults(node: NodeView) -> Iterable[str]:
    """What cannot be divided among ranks."""
    if node.tp > 1 and node.options.get("engine") == "fake":
        yield f"node '{node.name}' has tp={node.tp}, and engine 'fake' has no ranks; set {node.name}.tp=1"
    backend = _option(node, "cache_transceiver_config.backend")
    if node.tp > 1 and backend == "memory":
        yield f"node '{node.name}' has tp={node.tp}, and KV back end 'memory' knows one process only; use NIXL"


def pull_faults(decode: NodeView, graph: GraphView) -> Iterable[str]:
    """A decode worker must be able to pull the blocks of every prefill worker it asks."""
    sources = {source.name for source in graph.linked_to(decode.name, "kv")}
    for prefill in graph.linked_from(decode.name, "prefill"):
        if prefill.name not in sources:
            yield (
                f"node '{decode.name}' asks '{prefill.name}' for prompts but gets no KV blocks from it; "
                f"link {prefill.name}.kv >> {decode.name}.kv"
            )
        yield from _backend_faults(decode, prefill)
        ours, theirs = decode.options.get("block_size"), prefill.options.get("block_size")
        if ours and theirs and max(ours, theirs) % min(ours, theirs):
            yield (
                f"block sizes of '{prefill.name}' ({theirs}) and '{decode.name}' ({ours}) do not divide each other; "
                f"set {prefill.name}.block_size or {decode.name}.block_size to a multiple of the other"
            )


def _backend_faults(decode: NodeView, prefill: NodeView) -> Iterable[str]:
    for option in ("cache_transceiver_config.backend", "nixl_backend"):
        ours, theirs = _option(decode, option), _option(prefill, option)
        if ours and theirs and ours != theirs:
            yield (
                f"transfer back ends of '{prefill.name}' ({theirs}) and '{decode.name}' ({ours}) differ; "
                f"set {prefill.name}.{option} and {decode.name}.{option} to the same"
            )


def _option(node: NodeView, path: str) -> Any:
    value: Any = node.options
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def transceiver_warnings(node: NodeView) -> Iterable[str]:
    """Tells that a worker without a transfer backend refuses disaggregated requests."""
    config = node.options["cache_transceiver_config"]
    if config["backend"] is None:
        option = f"{node.name}.cache_transceiver_config.backend"
        yield f"{option} is unset, so a disaggregated request ends in '{DISABLED}'; set {option}=NIXL to enable it"


def reach_faults(router: NodeView, graph: GraphView) -> Iterable[str]:
    """A router may answer with any worker it follows, so whoever asks it must be linked to all of them."""
    followed = graph.linked_to(router.name, "events")
    generating = [node for node in followed if _serves(node, GenerateRequest)]
    prefilling = [node for node in followed if _serves(node, PrefillRequest)]
    askers = graph.linked_to(router.name, "placement")
    decoding = [node for node in generating if ports_of(node.component).get("prefill")]
    for callers, workers in ((askers, generating), (decoding, prefilling)):
        for caller in callers:
            reached = {edge.target for edge in graph.edges if edge.source == caller.name}
            for worker in workers:
                if worker.name not in reached:
                    yield (
                        f"router '{router.name}' may send '{caller.name}' to '{worker.name}', which it has no edge to; "
                        f"link {caller.name} to {worker.name}.requests, or give '{worker.name}' a router of its own"
                    )


def _serves(node: NodeView, request: type[Message]) -> bool:
    return any(isinstance(port, Serves) and request in port.requests for port in ports_of(node.component).values())
