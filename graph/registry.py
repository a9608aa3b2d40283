"""The registry: who is alive, where, in which state, and what follows for the graph's health.

Life of a replica as the registry sees it:

    starting   its process was started; it may have joined, and tells what it is doing
    ready      its component serves; others send it requests
    draining   it was asked to leave: nobody chooses it any more, running work goes on
    stopped    its process is reaped; withdrawn before anyone else hears of the death
    failed     like stopped, and it will not be started again by itself

Every change makes a new `Directory`, numbered, which is pushed to all replicas that joined. The
registry never guesses: only who owns the process says that it is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import msgspec

from graph.component import Health, Peer
from graph.declare import EdgeView, GraphView
from graph.ports import Message, Port, Receives, Sends, Serves

State = Literal["starting", "ready", "draining", "stopped", "failed"]

LIVE: frozenset[str] = frozenset({"starting", "ready", "draining"})
"""States in which there is a process."""

SUPERVISOR = "supervisor/0"
"""The id under which the supervisor takes part in the links."""


class Entry(msgspec.Struct, frozen=True):
    """One replica in the directory."""

    id: str
    boot: str
    address: str
    state: State
    facts: dict[str, int] = {}

    @property
    def node(self) -> str:
        """The node's name."""
        return self.id.partition("/")[0]

    def peer(self) -> Peer:
        """This replica as the links know it."""
        return Peer(self.id, self.boot, self.address, self.state, self.facts)


class Directory(Message, frozen=True, array_like=True, tag=True):
    """Everyone who is alive, and the graph's health; a later `version` replaces an earlier one."""

    version: int
    replicas: tuple[Entry, ...]
    health: Health


class Join(Message, frozen=True, array_like=True, tag=True):
    """Replica to supervisor, once per process. The stream stays open and brings every new `Directory`."""

    boot: str


class Report(Message, frozen=True, array_like=True, tag=True):
    """Replica to supervisor: my state, and what I am doing while I start (`fraction` of 1 done, if known).

    State "draining" is answered once nobody sends this replica new requests any more; "failed" comes right before
    the process ends and tells, as `doing`, why.
    A report with a `notice` brings that alone: something an operator should see. State "ready" brings `facts` that
    callers are told with the directory.
    """

    boot: str
    state: State
    doing: str = ""
    fraction: float | None = None
    notice: str = ""
    facts: dict[str, int] = msgspec.field(default_factory=dict)


class Noted(Message, frozen=True, array_like=True, tag=True):
    """The report was taken. `drain_s` is how long the running work of a draining replica may take."""

    drain_s: float | None = None


class CollectMetrics(Message, frozen=True, array_like=True, tag=True):
    """Replica to supervisor: all replicas' metrics, please, within `timeout_s`."""

    timeout_s: float


class MetricsText(Message, frozen=True, array_like=True, tag=True):
    """All metrics in Prometheus text format."""

    text: bytes


def supervisor_port() -> Serves:
    """The port that the supervisor serves to replicas. Its name can be no component's attribute."""
    port = Serves((Join, Report, CollectMetrics), (Directory, Noted, MetricsText))
    port.name = "supervisor.registry"
    return port


class Registry(Protocol):
    """Where the supervisor keeps the directory; another implementation may keep it outside the machine."""

    @property
    def directory(self) -> Directory:
        """The newest one."""

    def put(self, entry: Entry) -> None:
        """Adds a replica or changes its state."""

    def withdraw(self, id: str, boot: str) -> None:
        """The process is dead and reaped. Unknown and older boots are ignored."""

    def watch(self, callback: Callable[[Directory], None]) -> Callable[[], None]:
        """Calls back now and after every change; the returned function ends that."""


class LocalRegistry:
    """The registry in the supervisor's own memory."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._entries: dict[str, Entry] = {}
        self._watchers: dict[int, Callable[[Directory], None]] = {}
        self._num_watches = 0
        self._directory = Directory(0, (), health(view, {}))

    @property
    def directory(self) -> Directory:
        return self._directory

    def put(self, entry: Entry) -> None:
        if self._entries.get(entry.id) != entry:
            self._entries[entry.id] = entry
            self._publish()

    def withdraw(self, id: str, boot: str) -> None:
        entry = self._entries.get(id)
        if entry is not None and entry.boot == boot:
            del self._entries[id]
            self._publish()

    def watch(self, callback: Callable[[Directory], None]) -> Callable[[], None]:
        self._num_watches += 1
        key = self._num_watches
        self._watchers[key] = callback
        callback(self._directory)

        def unwatch() -> None:
            self._watchers.pop(key, None)

        return unwatch

    def _publish(self) -> None:
        self._directory = Directory(
            self._directory.version + 1, tuple(self._entries.values()), health(self._view, self._entries)
        )
        for callback in list(self._watchers.values()):
            callback(self._directory)


def health(view: GraphView, entries: Mapping[str, Entry]) -> Health:
    """Whether every edge has a ready replica at both ends.

    Degraded if only edges that can be missed lack one, else down.
    """
    ready = dict.fromkeys(view.nodes, 0)
    for entry in entries.values():
        if entry.state == "ready" and entry.node in ready:
            ready[entry.node] += 1
    missing, is_down = [], False
    for edge in view.edges:
        absent = next((node for node in (edge.target, edge.source) if not ready[node]), None)
        if absent is not None:
            missing.append(f"{edge.source}.{edge.source_port}: no ready replica of {absent!r}")
            is_down = is_down or not can_miss(view, edge)
    state = "down" if is_down else "degraded" if missing else "ready"
    return Health(state, tuple(missing), ready)


def can_miss(view: GraphView, edge: EdgeView) -> bool:
    """Whether the graph serves without this edge: its source does not require it, or, where bulk data
    flows, its target, for it is the receiver that depends on such an edge."""
    source = port_of(view, edge.source, edge.source_port)
    if isinstance(source, Sends):
        target = port_of(view, edge.target, edge.target_port)
        return not (isinstance(target, Receives) and target.required)
    return not source.required


def port_of(view: GraphView, node: str, name: str) -> Port:
    """The port of that name at the node's component."""
    port = getattr(view.nodes[node].component, name)
    assert isinstance(port, Port), "the check has seen that edges name ports"
    return port
