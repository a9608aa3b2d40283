"""The graph as a value: nodes, edges between their ports, options. Declaring one does nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from graph.component import Component, Options
from graph.errors import DeclarationError
from graph.ports import Port

RESOURCES = {"replicas": int, "gpus": float, "tp": int, "cores": float}
"""Counts and resources that sit on the node, never in the component. `cores` None shares what is left."""


class NodePort(msgspec.Struct, frozen=True):
    """One port of one node; `a >> b` declares an edge."""

    node: Node
    port: Port

    def __rshift__(self, target: NodePort) -> Edge:
        if not isinstance(target, NodePort):
            raise DeclarationError(
                f"{self} >> {target!r}: the right side must be a port of a node, such as router.placement"
            )
        return Edge(self, target)


class Edge(msgspec.Struct, frozen=True):
    """A link from one node's port to another's."""

    source: NodePort
    target: NodePort


class Node:
    """A component's place in a graph: its options, replicas, resources.

    `Node(DecodeWorker, replicas=2, gpus=1, block_size=16)`: the names in `RESOURCES` belong to the
    node, all others are options of the component. Ports are attributes: `node.requests`. The node's
    name is given by the graph: the module's variable that holds it, or `name=`.
    """

    def __init__(
        self,
        component: type[Component],
        *,
        name: str | None = None,
        replicas: int = 1,
        gpus: float = 0,
        tp: int = 1,
        cores: float | None = None,
        **options: Any,
    ) -> None:
        self.component = component
        self.name = name
        self.replicas = replicas
        self.gpus = gpus
        self.tp = tp
        self.cores = cores
        self.options = options

    def __getattr__(self, name: str) -> NodePort:
        component = self.__dict__.get("component")
        port = getattr(component, name, None)
        if isinstance(port, Port):
            return NodePort(self, port)
        ports = ", ".join(ports_of(component)) if component else ""
        raise AttributeError(f"{component.__name__ if component else 'node'} has no port {name!r}; it has {ports}")


class Graph:
    """Named edges between nodes; the nodes are those the edges and `nodes` mention, in that order."""

    def __init__(self, name: str, *edges: Edge, nodes: tuple[Node, ...] = ()) -> None:
        self.name = name
        self.edges = edges
        self.extra_nodes = nodes


def ports_of(component: type[Component]) -> dict[str, Port]:
    """The ports a component class declares, by name, inherited ones included."""
    found: dict[str, Port] = {}
    for cls in reversed(component.__mro__):
        found |= {name: value for name, value in vars(cls).items() if isinstance(value, Port)}
    return found


class NodeView(msgspec.Struct, frozen=True):
    """A node as the check, the launcher and `show` see it: named, with all its option values.

    `options` holds plain values by name (defaults included); `origins` says where each came from:
    "default", "environment", "file", the YAML's path, "--set", "--model", "resolved".
    """

    name: str
    component: type[Component]
    replicas: int
    gpus: float
    tp: int
    cores: float | None
    options: Mapping[str, Any]
    origins: Mapping[str, str]

    def frozen(self) -> Options:
        """The component's typed options."""
        return msgspec.convert(dict(self.options), self.component.Options)


class EdgeView(msgspec.Struct, frozen=True):
    """An edge by names: `source`/`target` are nodes, `source_port`/`target_port` their ports."""

    source: str
    source_port: str
    target: str
    target_port: str

    def __str__(self) -> str:
        return f"{self.source}.{self.source_port} >> {self.target}.{self.target_port}"


class GraphView(msgspec.Struct, frozen=True):
    """A graph with its names and values resolved: what everything after loading works on."""

    name: str
    file: str  # the graph file, absolute
    nodes: Mapping[str, NodeView]
    edges: tuple[EdgeView, ...]

    def linked_from(self, node: str, port: str) -> list[NodeView]:
        """The nodes that `node.port` points to."""
        return [self.nodes[e.target] for e in self.edges if (e.source, e.source_port) == (node, port)]

    def linked_to(self, node: str, port: str) -> list[NodeView]:
        """The nodes that point to `node.port`."""
        return [self.nodes[e.source] for e in self.edges if (e.target, e.target_port) == (node, port)]
