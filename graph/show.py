"""Pictures of a graph: text, Mermaid, JSON; and every option with its value and origin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from graph.declare import RESOURCES, EdgeView, GraphView, NodeView
from graph.loader import component_reference
from graph.ports import Calls, Publishes, Sends
from graph.words import counted

ARROWS = {Calls: "──▶", Publishes: "┄┄▶", Sends: "══▶"}
MERMAID_ARROWS = {Calls: "-->", Publishes: "-.->", Sends: "==>"}


def show_text(view: GraphView, *, config: bool = False) -> str:
    """The nodes in the order of a request's walk, each with what it is linked to.

    A plain arrow carries requests, a dotted one events, a double one bulk data.
    """
    lines = [f"graph {view.name}  ({view.file})", ""]
    width = max((len(name) for name in view.nodes), default=0)
    for name in walk_order(view):
        node = view.nodes[name]
        lines.append(f"  {name:<{width}}  {node.component.__name__}  {_resources(node)}".rstrip())
        for edge in view.edges:
            if edge.source == name:
                arrow = _arrow(view, edge, ARROWS)
                lines.append(f"  {'':<{width}}    {edge.source_port} {arrow} {edge.target}.{edge.target_port}")
        if config:
            lines += [f"  {'':<{width}}    {line}" for line in _config_lines(node)]
    return "\n".join(lines)


def show_mermaid(view: GraphView, *, config: bool = False) -> str:
    """A Mermaid flowchart; documents and code hosts draw it."""
    lines = ["flowchart LR"]
    for name in walk_order(view):
        node = view.nodes[name]
        label = [f"<b>{name}</b>", node.component.__name__, *([_resources(node)] if _resources(node) else [])]
        label += [line.replace('"', "'") for line in _config_lines(node)] if config else []
        lines.append(f'    {_id(name)}["{"<br/>".join(label)}"]')
    for edge in view.edges:
        arrow = _arrow(view, edge, MERMAID_ARROWS)
        lines.append(f"    {_id(edge.source)} {arrow}|{edge.source_port}| {_id(edge.target)}")
    return "\n".join(lines)


def show_json(view: GraphView, *, config: bool = False) -> str:
    """The graph for programs; with `config`, each value stands beside its origin."""
    nodes = {name: _node_json(view.nodes[name], view.file, config) for name in walk_order(view)}
    edges = [{"source": [e.source, e.source_port], "target": [e.target, e.target_port]} for e in view.edges]
    document = {"graph": view.name, "file": view.file, "nodes": nodes, "edges": edges}
    return msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2).decode()


FORMATS = {"text": show_text, "mermaid": show_mermaid, "json": show_json}


def values_of(node: NodeView) -> Iterator[tuple[str, Any, str]]:
    """Every resource and option of a node: dotted name, value, origin."""
    for resource in RESOURCES:
        yield resource, getattr(node, resource), node.origins.get(resource, "default")
    yield from _flat(node.options, "", node)


def walk_order(view: GraphView) -> list[str]:
    """The nodes as a request meets them: callers before the called, otherwise as declared."""
    calls = [(e.source, e.target) for e in view.edges if isinstance(_source_port(view, e), Calls)]
    order: list[str] = []
    left = list(view.nodes)
    while left:
        free = (name for name in left if not any(target == name and source in left for source, target in calls))
        chosen = next(free, left[0])  # a cycle of calls starts where the file does
        order.append(chosen)
        left.remove(chosen)
    return order


def _flat(options: Any, prefix: str, node: NodeView) -> Iterator[tuple[str, Any, str]]:
    for key, value in options.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in node.origins:  # a group of options
            yield from _flat(value, f"{name}.", node)
        else:
            yield name, value, node.origins.get(name, "default")


def _config_lines(node: NodeView) -> list[str]:
    values = [(f"{node.name}.{name} = {_spell(value)}", origin) for name, value, origin in values_of(node)]
    width = max(len(text) for text, _ in values)
    return [f"{text:<{width}}  ({origin})" for text, origin in values]


def _spell(value: Any) -> str:
    """A value as `--set` takes it."""
    return value if isinstance(value, str) and value else msgspec.json.encode(value, enc_hook=str).decode()


def _node_json(node: NodeView, file: str, config: bool) -> dict[str, Any]:
    told: dict[str, Any] = {"component": component_reference(node.component, file)}
    told |= {resource: getattr(node, resource) for resource in RESOURCES}
    if config:
        told["options"] = {name: {"value": value, "origin": origin} for name, value, origin in values_of(node)}
    return told


def _resources(node: NodeView) -> str:
    """Replicas and resources that are not one's default: "x2, 1 GPU each"."""
    each = [f"{node.gpus:g} GPU"] if node.gpus else []
    each += [f"tp {node.tp}"] if node.tp != 1 else []
    each += [counted(node.cores, "core")] if node.cores is not None else []
    return ", ".join([f"x{node.replicas}", *each]) if each or node.replicas != 1 else ""


def _arrow(view: GraphView, edge: EdgeView, arrows: dict[Any, str]) -> str:
    port = _source_port(view, edge)
    return next((arrow for kind, arrow in arrows.items() if isinstance(port, kind)), arrows[Calls])


def _source_port(view: GraphView, edge: EdgeView) -> Any:
    return getattr(view.nodes[edge.source].component, edge.source_port)


def _id(name: str) -> str:
    """A node's name as a Mermaid id: `end` and the like are words of the language."""
    return f"n_{name}".replace("-", "_").replace("'", "_")
