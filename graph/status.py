"""The status of a running graph: what `graph status --json` prints."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
import psutil

from graph.managed import Managed
from graph.metrics import Family, Sample
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
    last_words: str = ""  # the end of its log, if it failed without saying why
    rss_mb: int | None = None
    start_s: float | None = None  # how long it took to become ready
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them
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


def graph_families(status: GraphStatus, num_hangs: Mapping[str, int]) -> list[Family]:
    """The supervisor's own metrics: what it keeps running, and how often it had to step in."""
    replicas = [(node, replica) for node, counts in status.nodes.items() for replica in counts.replicas]
    states = Counter((node, replica.state) for node, replica in replicas)
    return [
        Family("headrace_replicas", "Replicas by state.", "gauge", tuple(
            Sample("headrace_replicas", {"node": node, "state": state}, n) for (node, state), n in states.items())),
        Family("headrace_replicas_desired", "Replicas there should be.", "gauge", tuple(
            Sample("headrace_replicas_desired", {"node": node}, n.desired) for node, n in status.nodes.items())),
        Family("headrace_replica_restarts", "Restarts that nobody asked for.", "counter", tuple(
            Sample("headrace_replica_restarts_total", {"node": node, "replica": r.id}, r.restarts)
            for node, r in replicas)),
        Family("headrace_replica_hangs", "Replicas killed because no work got done.", "counter", tuple(
            Sample("headrace_replica_hangs_total", {"node": node}, n) for node, n in num_hangs.items())),
        Family("headrace_replica_start_seconds", "From the start of the process until it was ready.", "gauge", tuple(
            Sample("headrace_replica_start_seconds", {"node": node, "replica": r.id}, r.start_s)
            for node, r in replicas if r.start_s is not None)),
    ]  # fmt: skip


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
        managed.start_s,
        managed.gpus,
        managed.notice,
    )


def _rss_mb(pid: int) -> int | None:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss) >> 20
    return None
