"""The check of a graph: a pure function from (graph, machine) to every fault at once.

Each fault says what is wrong, where, and what to do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from graph.declare import EdgeView, GraphView, NodeView, ports_of
from graph.draft import leaves_of
from graph.policy import most_replicas
from graph.ports import Calls, Port, Publishes, Sends
from graph.resources import Machine
from graph.words import there_are


class Report(msgspec.Struct, frozen=True):
    """What the check found: a graph with faults must not run, one with warnings may."""

    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether the graph may run."""
        return not self.faults


def check(view: GraphView, machine: Machine, declared: Iterable[str] = ()) -> Report:
    """Every fault and warning of a graph. `declared` are the faults that were found while it was resolved."""
    faults = [
        *declared,
        *_edge_faults(view),
        *_unlinked(view),
        *_count_faults(view),
        *_disagreements(view),
        *_gpu_faults(view, machine),
        *_listen_faults(view),
        *_hooks(view, "check"),
    ]
    warnings = [*_lonely(view), *_cpu_warning(view, machine), *_hooks(view, "warnings")]
    return Report(tuple(dict.fromkeys(faults)), tuple(dict.fromkeys(warnings)))


def _edge_faults(view: GraphView) -> Iterator[str]:
    """Edges between ports that do not fit, from a node to itself, or listed more than once."""
    for edge, count in Counter(view.edges).items():
        if count > 1:
            yield f"edge {edge} is listed {count} times; keep one"
        if edge.source == edge.target:
            yield f"edge {edge} links node '{edge.source}' to itself; link it to another node"
        reason = _port(view, edge.source, edge.source_port).mismatch(_port(view, edge.target, edge.target_port))
        if reason:
            yield f"edge {edge} cannot work: {reason}; {_instead(view, edge)}"


def _instead(view: GraphView, edge: EdgeView) -> str:
    """What to do about an edge that does not fit."""
    source, target = _port(view, edge.source, edge.source_port), _port(view, edge.target, edge.target_port)
    if target.mismatch(source) is None:
        return f"turn it around: {edge.target}.{edge.target_port} >> {edge.source}.{edge.source_port}"
    partners = _partners(view, edge.source, source) if _is_source(source) else []
    if not partners:
        return "no other port in this graph takes it; remove the edge"
    return f"link {edge.source}.{edge.source_port} to {' or '.join(partners)}"


def _unlinked(view: GraphView) -> Iterator[str]:
    """Required ports without an edge."""
    if not view.nodes:
        yield f"graph '{view.name}' has no nodes; give it edges, or nodes=(...)"
    for name, node in view.nodes.items():
        for port in ports_of(node.component).values():
            linked = view.linked_from(name, port.name) if _is_source(port) else view.linked_to(name, port.name)
            if port.required and not linked:
                yield _unlinked_fault(view, name, port)


def _unlinked_fault(view: GraphView, name: str, port: Port) -> str:
    """The message for one required port, with the nodes of this graph it could be linked to."""
    partners = _partners(view, name, port)
    kinds = dict.fromkeys(_kind(view.nodes[partner.partition(".")[0]]) for partner in partners)
    who = f"a {' or a '.join(kinds)}" if kinds else f"any peer for '{port.name}'"
    own, direction = f"{name}.{port.name}", "to" if _is_source(port) else "from"
    edges = [f"{own} >> {p}" if _is_source(port) else f"{p} >> {own}" for p in partners]
    how = f": {' or '.join(edges)}" if edges else ", and add the node it needs"
    return f"node '{name}' has no edge {direction} {who}; link {own} in {Path(view.file).name}{how}"


def _partners(view: GraphView, name: str, port: Port) -> list[str]:
    """The ports of other nodes, as "node.port", that an edge from or to `port` would fit."""
    return [
        f"{other}.{candidate.name}"
        for other, node in view.nodes.items()
        if other != name
        for candidate in ports_of(node.component).values()
        if (port.mismatch(candidate) if _is_source(port) else candidate.mismatch(port)) is None
    ]


def _kind(node: NodeView) -> str:
    """A component's class name as words: "prefill worker"."""
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+", node.component.__name__)
    return " ".join(word if word.isupper() else word.lower() for word in words)


def _count_faults(view: GraphView) -> Iterator[str]:
    """Counts and resources below what they can be."""
    for name, node in view.nodes.items():
        for option, value, least in (("replicas", node.replicas, 0), ("gpus", node.gpus, 0), ("tp", node.tp, 1)):
            if value < least:
                yield f"node '{name}' has {option} {value:g}; set {name}.{option} to {least} or more"
        if node.replicas > (most := most_replicas(node)):
            yield f"node '{name}' has {node.replicas} replicas; {_kind(node)}s can be at most {most}"
        if node.cores is not None and node.cores <= 0:
            yield f"node '{name}' has cores {node.cores:g}; set it above 0, or leave it out to share"


def _disagreements(view: GraphView) -> Iterator[str]:
    """Options declared with `agrees` that differ across an edge. None means derived, and agrees with all."""
    pairs = {frozenset((edge.source, edge.target)): (edge.source, edge.target) for edge in reversed(view.edges)}
    for source, target in reversed(pairs.values()):
        one, other = view.nodes[source], view.nodes[target]
        theirs = leaves_of(other.component.Options)
        for path, leaf in leaves_of(one.component.Options).items():
            if not (leaf.agrees and path in theirs and theirs[path].agrees):
                continue
            ours, differs = _value(one, path), _value(other, path)
            if None not in (ours, differs) and ours != differs:
                option = ".".join(path)
                yield (
                    f"nodes '{source}' and '{target}' are linked but differ in {option}: {ours!r} and {differs!r}; "
                    f"set {source}.{option} and {target}.{option} to the same value"
                )


def _gpu_faults(view: GraphView, machine: Machine) -> Iterator[str]:
    """More GPUs asked for than there are; on a machine without any, everything runs on the CPU instead."""
    asked = {name: node.replicas * node.gpus * node.tp for name, node in view.nodes.items() if node.gpus > 0}
    total = sum(asked.values())
    if 0 < len(machine.gpus) < total:
        parts = ", ".join(f"{name} {num:g}" for name, num in asked.items())
        yield (
            f"the graph asks for {total:g} GPUs ({parts}) and {there_are(len(machine.gpus))}; "
            f"lower replicas, gpus or tp, such as --set {next(iter(asked))}.gpus=0.5"
        )
        return
    for name in asked:
        needed = view.nodes[name].tp * max(1, int(view.nodes[name].gpus))
        if 0 < len(machine.gpus) < needed:
            yield f"node '{name}' needs {needed} GPUs at once and {there_are(len(machine.gpus))}; lower {name}.tp"


def _cpu_warning(view: GraphView, machine: Machine) -> Iterator[str]:
    names = [f"'{name}'" for name, node in view.nodes.items() if node.gpus > 0]
    if names and not machine.gpus:
        yield f"no GPU here: {', '.join(names)} {'runs' if len(names) == 1 else 'run'} on the CPU"


def _listen_faults(view: GraphView) -> Iterator[str]:
    """Two nodes that want the same TCP port; port 0 takes a free one."""
    takers: dict[int, str] = {}
    for name, node in view.nodes.items():
        port = node.options.get(node.component.listens.port) if node.component.listens else None
        if not port:
            continue
        if port in takers:
            yield f"nodes '{takers[port]}' and '{name}' both listen on port {port}; set {name}'s to another, or to 0"
        takers.setdefault(port, name)


def _lonely(view: GraphView) -> Iterator[str]:
    linked = {name for edge in view.edges for name in (edge.source, edge.target)}
    for name, node in view.nodes.items():
        if name not in linked and ports_of(node.component):
            yield f"node '{name}' has no edges: nothing reaches it"


def _hooks(view: GraphView, hook: str) -> Iterator[str]:
    """What the components themselves find; a hook that raises is a fault of its component."""
    for name, node in view.nodes.items():
        try:
            yield from getattr(node.component, hook)(node, view)
        except Exception as error:  # a user's component may raise anything; the check must go on
            yield f"node '{name}': {node.component.__name__}.{hook} raised {type(error).__name__}: {error}"


def _port(view: GraphView, node: str, port: str) -> Port:
    return ports_of(view.nodes[node].component)[port]


def _is_source(port: Port) -> bool:
    return isinstance(port, Calls | Publishes | Sends)


def _value(node: NodeView, path: tuple[str, ...]) -> Any:
    value: Any = node.options
    for key in path:
        value = value[key]
    return value
