"""Decisions of the supervisor: when to start again, in which order to leave, what a command means. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from graph.declare import GraphView, NodeView
from graph.errors import DeclarationError
from graph.ports import Calls
from graph.registry import State
from graph.words import counted, there_are

if TYPE_CHECKING:
    from graph.managed import Managed

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
STABLE_S = 30.0
MAX_FAILED_STARTS = 3
MAX_REPLICAS = 1_000
DRAIN_TIMEOUT_S = 30.0
"""How long the running work of a replica that leaves may take to finish; what is left is handed over then."""

KILL_MARGIN_S = 3.0
"""How long after that a replica may take to end."""

MAX_COMPUTE_PER_CORE = 8
"""Replicas that compute all the time, for each core of the machine; with more, nobody gets anything done."""

_USEFULNESS: tuple[State, ...] = ("failed", "stopped", "draining", "starting", "ready")  # in rising order


class Backoff:
    """How long to wait before a replica is started again, and when to give up."""

    def __init__(self) -> None:
        self._delay_s = FIRST_DELAY_S
        self._failed_starts = 0

    def next_delay_s(self, ready_s: float | None) -> float | None:
        """Called after each death; `ready_s` is how long it was ready, None if it never was.

        None means: it failed to start too often in a row, give up.
        """
        if ready_s is None:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                return None
        else:
            self._failed_starts = 0
            if ready_s >= STABLE_S:
                self._delay_s = FIRST_DELAY_S
        delay_s = self._delay_s
        self._delay_s = min(LONGEST_DELAY_S, delay_s * 2)
        return delay_s


def drain_order(view: GraphView) -> list[list[str]]:
    """The nodes in groups, callers before those they call, so that each can finish its work."""
    calls = {
        (edge.source, edge.target)
        for edge in view.edges
        if edge.source != edge.target
        and isinstance(getattr(view.nodes[edge.source].component, edge.source_port), Calls)
    }
    left, order = list(view.nodes), []
    while left:
        uncalled = [node for node in left if not any((caller, node) in calls for caller in left)]
        group = uncalled or left  # nodes that call each other in a ring leave together
        order.append(group)
        left = [node for node in left if node not in group]
    return order


def plan_scale(
    view: GraphView, desired: Mapping[str, int], targets: Sequence[str], num_gpus: int, num_cores: int
) -> dict[str, int]:
    """The new counts that `NODE=N`, `NODE=+N`, `NODE=-N` ask for, each node once.

    Raises `DeclarationError` naming every fault; `num_gpus` 0 means that there is none to divide.
    """
    faults: list[str] = []
    counts: dict[str, int] = {}
    for target in targets:
        node, _, amount = target.partition("=")
        match = re.fullmatch(r"([+-]?)(\d{1,6})", amount)
        if match is None:
            faults.append(f"{target!r} is not NODE=N, NODE=+N or NODE=-N")
        elif node not in view.nodes:
            faults.append(f"no node {node!r}; the graph has {', '.join(view.nodes)}")
        elif node in counts:
            faults.append(f"node {node!r} is named twice")
        else:
            counts[node] = _count(desired[node], match[1], int(match[2]))
    faults += [f"{node}={n}: there cannot be fewer than 0 replicas" for node, n in counts.items() if n < 0]
    faults += [
        f"{node}={n}: a graph can have at most {counted(most, 'replica')} of {view.nodes[node].component.__name__}"
        for node, n in counts.items()
        if n > (most := most_replicas(view.nodes[node]))
    ]
    if not faults:
        faults += _resource_faults(view, {**desired, **counts}, counts, num_gpus, num_cores)
    if not targets:
        faults.append("name at least one NODE=N")
    if faults:
        raise DeclarationError("; ".join(faults))
    return counts


def most_replicas(node: NodeView) -> int:
    """How many replicas a node may have, whatever the machine."""
    limit = node.component.max_replicas
    return MAX_REPLICAS if limit is None else limit


def _resource_faults(
    view: GraphView, wanted: Mapping[str, int], counts: Mapping[str, int], num_gpus: int, num_cores: int
) -> list[str]:
    """What the machine has not got. Only who asks for more of something is told that there is too little."""
    faults = []
    gpus = sum(node.gpus * node.tp * wanted[name] for name, node in view.nodes.items())
    if num_gpus and gpus > num_gpus:
        asked = ", ".join(
            f"{name} {node.gpus * node.tp * wanted[name]:g}" for name, node in view.nodes.items() if node.gpus
        )
        faults.append(f"that takes {gpus:g} GPUs ({asked}), but {there_are(num_gpus)}")
    computing = sum(wanted[name] for name, node in view.nodes.items() if node.component.compute)
    if any(view.nodes[name].component.compute for name in counts) and computing > MAX_COMPUTE_PER_CORE * num_cores:
        faults.append(
            f"that makes {computing} replicas that compute, but {counted(num_cores, 'core')} can carry at most "
            f"{MAX_COMPUTE_PER_CORE * num_cores}"
        )
    return faults


def _count(now: int, sign: str, number: int) -> int:
    return {"": number, "+": now + number, "-": now - number}[sign]


def surplus(replicas: Iterable[Managed], count: int) -> list[Managed]:
    """Which of a node's replicas leave so that `count` stay: those that serve last, of like ones the highest index."""
    ordered = sorted(replicas, key=lambda m: (_USEFULNESS.index(m.state), -m.index))
    return ordered[: max(0, len(ordered) - count)]


def free_indexes(taken: Iterable[int], count: int) -> list[int]:
    """The lowest `count` indexes that no replica of the node has."""
    used = set(taken)
    found: list[int] = []
    index = 0
    while len(found) < count:
        if index not in used:
            found.append(index)
        index += 1
    return found


def split_replica(view: GraphView, target: str) -> tuple[str, int | None]:
    """`NODE` or `NODE/I` as a node of the graph and an index; raises `DeclarationError`."""
    node, slash, index = target.partition("/")
    if node not in view.nodes:
        raise DeclarationError(f"no node {node!r}; the graph has {', '.join(view.nodes)}")
    if slash and not index.isdecimal():
        raise DeclarationError(f"{target!r} is not NODE or NODE/I")
    return node, int(index) if slash else None
