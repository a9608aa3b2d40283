"""The status of a running graph: what `graph status --json` prints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import msgspec
import psutil

from graph.managed import Managed
from graph.registry import State


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica. Times are unix seconds; `restarts` counts the deaths that nobody asked for."""

    id: str
    pid: int | None
    state: State
    since: float
    boot: str
    restarts: int
    doing: str = ""
    reason: str = ""  # why it died last
    last_words: str = ""  # the end of its log, if it failed
    rss_mb: int | None = None
    notice: str = ""  # what the replica wants an operator to see, such as a slow link


class NodeStatus(msgspec.Struct, frozen=True):
    """One node: how many replicas it should have, how many serve, and each of them."""

    desired: int
    ready: int
    replicas: tuple[ReplicaStatus, ...]


class GraphStatus(msgspec.Struct, frozen=True):
    """The whole graph; `state` is starting, ready, degraded, down or draining."""

    graph: str
    state: str
    url: str | None
    nodes: dict[str, NodeStatus]


def node_status(desired: int, replicas: Iterable[Managed]) -> NodeStatus:
    """The status of one node's replicas, in the order of their indexes."""
    ordered = sorted(replicas, key=lambda managed: managed.index)
    return NodeStatus(desired, sum(m.state == "ready" for m in ordered), tuple(_replica_status(m) for m in ordered))


def num_in_states(nodes: Mapping[str, NodeStatus]) -> dict[tuple[str, str], int]:
    """Number of replicas by node and state, zeros left out."""
    counts: dict[tuple[str, str], int] = {}
    for node, status in nodes.items():
        for replica in status.replicas:
            counts[node, replica.state] = counts.get((node, replica.state), 0) + 1
    return counts


def _replica_status(managed: Managed) -> ReplicaStatus:
    pid = None if managed.process is None else managed.process.pid
    return ReplicaStatus(
        managed.id,
        pid,
        managed.state,
        managed.since_s,
        managed.boot,
        managed.num_restarts,
        managed.doing,
        managed.reason,
        managed.last_words,
        None if pid is None else _rss_mb(pid),
        managed.notice,
    )


def _rss_mb(pid: int) -> int | None:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss) >> 20
    return None
