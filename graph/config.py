"""Configuration: a declared graph and its overrides become a `GraphView`, every value with its origin.

Precedence, weakest first: defaults, environment, graph file, YAML files, flags. What a component
left on "auto" is resolved last, from the rest of the graph. Nothing here reads anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from graph.declare import Edge, EdgeView, Graph, GraphView, Node, NodeView
from graph.draft import Draft, nearest
from graph.errors import DeclarationError
from graph.overrides import ANY, Overrides, Setting, parse_scalar

NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
GRAPH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Resolved(msgspec.Struct, frozen=True):
    """A graph with its values, and all faults found on the way; where one was, the weaker value stands."""

    view: GraphView
    faults: tuple[str, ...] = ()


def resolve(graph: Graph, module: ModuleType, overrides: Overrides) -> Resolved:
    """Names the nodes, applies the overrides in order of precedence, and resolves what is left on "auto"."""
    file = str(Path(module.__file__ or "").resolve())
    faults: list[str] = []
    names = _name_nodes(graph, module, faults)
    drafts = {name: Draft(name, node.component) for node, name in names.items()}
    declared = [
        Setting(name, (option,), value, "file") for node, name in names.items() for option, value in _declared(node)
    ]
    flags = list(_listening(drafts, overrides, faults))
    for setting in (*_environment(drafts, overrides.environ), *declared, *overrides.settings, *flags):
        faults += _apply(setting, drafts, file)
    faults += [fault for draft in drafts.values() for fault in draft.missing()]
    edges = tuple(_edge_view(edge, names) for edge in graph.edges)
    view = GraphView(graph.name, file, {name: draft.view() for name, draft in drafts.items()}, edges)
    if not faults:
        view = _resolve_auto(view, drafts, faults)
    faults += [fault for node in view.nodes.values() for fault in _misfits(node)] if not faults else []
    return Resolved(view, tuple(faults))


def frozen_view(resolved: Resolved) -> GraphView:
    """The view, or a `DeclarationError` that tells every fault."""
    if resolved.faults:
        raise DeclarationError("\n".join(resolved.faults))
    return resolved.view


def _name_nodes(graph: Graph, module: ModuleType, faults: list[str]) -> dict[Node, str]:
    """Every node of the graph with its name: its own, else the module's variable that holds it."""
    variables: dict[Node, str] = {}
    for variable, value in vars(module).items():
        if isinstance(value, Node):
            variables.setdefault(value, variable)
    mentioned = [end.node for edge in graph.edges for end in (edge.source, edge.target)]
    names: dict[Node, str] = {}
    if not GRAPH_NAME.fullmatch(graph.name):
        faults.append(f"the graph's name {graph.name!r} must be made of letters, digits, '-' and '_'; rename it")
    for node in dict.fromkeys((*mentioned, *graph.extra_nodes)):
        names[node] = _name(node, variables.get(node), set(names.values()), faults)
    return names


def _name(node: Node, variable: str | None, taken: set[str], faults: list[str]) -> str:
    """The node's name; one that is missing, malformed or taken is a fault and gets a unique stand-in."""
    component = node.component.__name__
    name = node.name or variable
    if name is None:
        faults.append(
            f"a {component} node has no name; assign it to a variable, or write Node({component}, name='...')"
        )
        name = component
    elif not NODE_NAME.fullmatch(name):
        faults.append(f"node name {name!r} must be made of letters, digits, '-' and '_'; rename it")
    elif name in taken:
        faults.append(f"two nodes are named '{name}'; rename one of them")
    unique = name
    while unique in taken:
        unique += "'"
    return unique


def _declared(node: Node) -> Iterator[tuple[str, Any]]:
    """What the graph file says of a node; a resource left at the node's default says nothing."""
    for resource, default in (("replicas", 1), ("gpus", 0), ("tp", 1), ("cores", None)):
        value = getattr(node, resource)
        if value != default:
            yield resource, value
    yield from node.options.items()


def _environment(drafts: Mapping[str, Draft], environ: Mapping[str, str]) -> Iterator[Setting]:
    """The environment's values for the options that name a variable; an empty one counts as unset."""
    for name, draft in drafts.items():
        for path, leaf in draft.leaves.items():
            text = environ.get(leaf.env) if leaf.env else None
            if text:
                yield Setting(name, path, parse_scalar(text), f"environment {leaf.env}", text)


def _listening(drafts: Mapping[str, Draft], overrides: Overrides, faults: list[str]) -> Iterator[Setting]:
    """`--host` and `--port` for the one node that listens."""
    for flag, value in (("host", overrides.host), ("port", overrides.port)):
        if value is None:
            continue
        listening = [draft for draft in drafts.values() if draft.component.listens]
        if len(listening) != 1:
            names = ", ".join(draft.name for draft in listening) or "no node"
            faults.append(f"--{flag}: {names} listens; set the option of one node with --set node.{flag}=...")
            continue
        option = getattr(listening[0].component.listens, flag)
        yield Setting(listening[0].name, (option,), value, f"--{flag}")


def _apply(setting: Setting, drafts: Mapping[str, Draft], file: str) -> list[str]:
    """Puts one setting into the draft of its node, or of every node that has the option; returns the faults."""
    where = Path(file).name if setting.origin == "file" else setting.origin
    if setting.node == ANY:
        takers = [draft for draft in drafts.values() if draft.knows(setting.path)]
        if not takers:
            return [f"{where}: no node has an option '{'.'.join(setting.path)}'"]
    elif setting.node in drafts:
        takers = [drafts[setting.node]]
    else:
        return [f"{where}: there is no node '{setting.node}'; {nearest(setting.node, drafts)}"]
    return [
        f"{where}: {fault}"
        for draft in takers
        for fault in draft.assign(setting.path, setting.value, setting.origin, setting.text)
    ]


def _edge_view(edge: Edge, names: Mapping[Node, str]) -> EdgeView:
    source, target = edge.source, edge.target
    return EdgeView(names[source.node], source.port.name, names[target.node], target.port.name)


def _resolve_auto(view: GraphView, drafts: Mapping[str, Draft], faults: list[str]) -> GraphView:
    """Asks every component for what follows from the rest of the graph; all see the same, unresolved graph."""
    for name, draft in drafts.items():
        hook = f"{draft.component.__name__}.resolve"
        try:
            found = draft.component.resolve(view.nodes[name], view)
        except Exception as error:  # a user's component may raise anything
            faults.append(f"node '{name}': {hook} raised {type(error).__name__}: {error}")
            continue
        for option, value in found.items():
            faults += [f"{hook}: {fault}" for fault in draft.assign((option,), value, "resolved")]
    return GraphView(view.name, view.file, {name: draft.view() for name, draft in drafts.items()}, view.edges)


def _misfits(node: NodeView) -> list[str]:
    """What the options' own validation says of the values together."""
    try:
        node.frozen()
    except msgspec.ValidationError as error:
        return [f"node '{node.name}' ({node.component.__name__}): {error}"]
    return []
