"""What a replica's process is told at its start: the component, its frozen options, addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from graph.component import Peer
from graph.declare import GraphView, NodeView
from graph.ports import Port


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One JSON line on the process's standard input; the pipe stays open as long as the parent lives.

    `targets` maps each linked port to the nodes at its other end and the name of their port. The
    listening socket is inherited under the number `listener`.
    """

    id: str
    boot: str
    graph: str
    component: str  # "module:Class" or "/path/file.py:Class"
    options: dict[str, Any]
    run_dir: str
    address: str
    supervisor: Peer
    targets: dict[str, dict[str, str]]
    num_cores: int
    tp: int = 1
    gpu_share: float = 1.0  # of each GPU it sees
    parent_pid: int
    listener: int | None = None

    @property
    def title(self) -> str:
        """The process's title."""
        return f"headrace: {self.graph} {self.id}"


def plain_options(node: NodeView) -> dict[str, Any]:
    """The node's options as JSON can carry them."""
    plain = msgspec.to_builtins(node.frozen())
    assert isinstance(plain, dict)
    return plain


def targets_of(view: GraphView, node: str) -> dict[str, dict[str, str]]:
    """For each port of `node` that an edge links: which port of which node is at the other end."""
    targets: dict[str, dict[str, str]] = {}
    for edge in view.edges:
        if edge.source == node:
            targets.setdefault(edge.source_port, {})[edge.target] = edge.target_port
        if edge.target == node:
            targets.setdefault(edge.target_port, {})[edge.source] = edge.source_port
    return targets


def links_of(targets: Mapping[str, dict[str, str]], port: Port) -> dict[str, str]:
    """The other ends of one port; none when the graph leaves it unlinked."""
    return targets.get(port.name, {})
