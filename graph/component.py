"""What a component is, and what the SDK hands it while it runs.

Life of a component inside its replica process:

    declared   the class: ports, `Options`; importing it does nothing
    starting   the replica made one instance and awaits `start(context)`; links are open, peers
               appear in its clients as they become ready, its own requests are not served yet
    ready      `start` returned; the registry tells the others, requests arrive
    draining   no new requests arrive; `drain()` returns when the running work is done
    stopped    `stop()` has freed everything; the process ends

A `Context` is the only door to the outside: links, progress, metrics, the listening socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from graph.errors import LinkError
from graph.ports import Calls, Message, Publishes, Serves, Subscribes

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from graph.declare import GraphView, NodeView


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a component's options: typed, frozen, each with its default in one place.

    An option may carry `Annotated[T, option(...)]` to say what it means and how it must agree. A number takes
    its type from `graph.bounds`, which says what it may be.
    """


def option(help: str, *, agrees: bool = False, env: str | None = None) -> msgspec.Meta:
    """Describes an option for `graph show --config`.

    With `agrees`, the check demands equal values at both ends of every edge whose two
    components have an option of this name. `env` names the environment variable that sets it
    where nothing stronger does; the CLI reads it, never the component.
    """
    return msgspec.Meta(description=help, extra={"agrees": agrees, "env": env})


class Listen(msgspec.Struct, frozen=True):
    """Names the options that hold the host and port of a component's public TCP socket.

    The supervisor binds it before anything is loaded, keeps it open across restarts, and hands
    it to every replica of the node as `Context.listener`.
    """

    host: str = "host"
    port: str = "port"


class Component:
    """Base of all components. Subclasses declare ports, `Options`, and the life-cycle methods."""

    Options: ClassVar[type[Options]] = Options
    listens: ClassVar[Listen | None] = None
    compute: ClassVar[bool] = False  # True: computes all the time, and shares the cores with others like it
    max_replicas: ClassVar[int | None] = None  # a node of this component may have no more

    def __init__(self, options: Any) -> None:
        self.options = options

    async def start(self, context: Context) -> None:
        """Called once; returns when the component can serve. Raising means it failed to start."""

    async def drain(self) -> None:
        """Called once before a planned stop; returns when the running work is done."""

    async def stop(self) -> None:
        """Called once at the end, also after a failed start; frees everything."""

    async def alive(self) -> None:
        """Called now and then by the supervisor; returns when real work still gets done.

        A component with an engine sends a canary through it. Raising, or not returning within `patience_s`,
        means hung: the process is killed and replaced.
        """

    @classmethod
    def patience_s(cls, node: NodeView) -> float:
        """How long `alive` may take on this node; must exceed its longest step. Pure."""
        return 30.0

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """Faults of this node that only its component can see; pure. Each says what to do."""
        return ()

    @classmethod
    def warnings(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        """What is allowed but probably not meant; pure."""
        return ()

    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        """Values for options left on "auto" that follow from the rest of the graph; pure.

        Called after all overrides and before freezing, e.g. to fill in the hash unit that is the
        smallest block size in the graph.
        """
        return {}


class Peer(msgspec.Struct, frozen=True):
    """One replica at the other end of an edge. `boot` changes with every start of its process.

    `facts` are what it announced of itself while it started.
    """

    id: str  # "decode/0"
    boot: str
    address: str
    state: str = "ready"
    facts: dict[str, int] = {}

    @property
    def node(self) -> str:
        """The node's name."""
        return self.id.partition("/")[0]


class Stream(Protocol):
    """The server's half of one request: any number of replies, then exactly one end.

    All methods must be called on the event loop's thread and never block; what is sent within
    one turn of the loop leaves as one wire message per peer. Once the stream is closed (ended,
    failed, cancelled or the caller lost) every method is a no-op.
    """

    @property
    def id(self) -> str:
        """Unique among all streams of this replica's life."""

    @property
    def peer(self) -> str:
        """The caller's replica id."""

    @property
    def is_closed(self) -> bool:
        """Whether the stream has ended in any way."""

    def send(self, item: Message) -> None:
        """Sends one reply."""

    def end(self, item: Message | None = None) -> None:
        """Ends the stream well, with an optional last reply."""

    def fail(self, error: LinkError) -> None:
        """Ends the stream with an error."""

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Calls back, once, if the caller cancels, dies or is cut off before the end."""


Handler = Callable[[Any, Stream], Awaitable[None] | None]
"""Takes a request and its stream. It may return with the stream still open and answer later; an
exception it raises ends the stream (`LinkError` as it is, anything else as `PeerFault`)."""


class Call(Protocol):
    """The caller's half of one request."""

    @property
    def peer(self) -> Peer:
        """The replica that was asked."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """The replies in order; raises the `LinkError` the request ended in, if it did."""

    def cancel(self) -> None:
        """Tells the peer that nobody listens any more. Idempotent, allowed after the end."""


class Client(Protocol):
    """Sends the requests of one `Calls` port. All methods belong to the event loop's thread."""

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The ready replicas at the other end, by id."""

    @property
    def is_linked(self) -> bool:
        """Whether the graph links this port at all."""

    async def wait_peer(self, timeout_s: float) -> Peer:
        """The first peer that is ready; raises `NoPeer` if there is none in time."""

    def open(
        self,
        request: Message,
        *,
        peer: str,
        timeout_s: float,
        on_item: Callable[[Any], None] | None = None,
        on_end: Callable[[LinkError | None], None] | None = None,
    ) -> Call:
        """Starts a request. `timeout_s` bounds the wait for each next reply.

        With `on_item` and `on_end` replies are pushed instead of iterated: no task, no queue;
        `on_end` comes exactly once, with None after a good end. Raises `NoPeer` if `peer` is not
        known; every later fault arrives as the end of the call.
        """

    async def call(self, request: Message, *, peer: str, timeout_s: float) -> Any:
        """Sends a request that has exactly one reply, and returns it."""

    def on_change(self, callback: Callable[[Mapping[str, Peer]], None]) -> None:
        """Calls back now and whenever the set of ready peers changes."""


class Publisher(Protocol):
    """Publishes the events of one `Publishes` port, numbered from 1 at every process start."""

    def publish(self, event: Message) -> None:
        """Sends `event` to all subscribers; never blocks. Event loop's thread only."""


class Subscription(Protocol):
    """Receives what one `Subscribes` port follows, for all peers at the other end.

    For each peer that is ready: `on_snapshot` first, then every later event in order. After a gap, and
    after a restart of the peer, comes a fresh `on_snapshot` that replaces all that was known.
    `on_lost` comes once when the peer is ready no more: draining or gone.
    """

    def on_snapshot(self, peer: Peer, snapshot: Any) -> None: ...

    def on_event(self, peer: Peer, event: Any) -> None: ...

    def on_lost(self, peer: Peer) -> None: ...


class Context(Protocol):
    """What a running replica is given."""

    id: str  # "decode/0"
    boot: str  # unique per process start
    graph: str  # the running graph's name
    run_dir: Path  # this graph's private folder; gone when the graph ends
    num_cores: int  # CPU cores this replica may use, all its ranks together
    tp: int  # ranks of this replica; a component with more than one starts the others itself
    gpu_share: float  # of each GPU that the process sees, what this replica may use
    listener: socket.socket | None  # bound by the supervisor, for a component with `listens`
    metrics: CollectorRegistry
    loop: asyncio.AbstractEventLoop

    def serve(self, port: Serves, handler: Handler, *, max_streams: int = 100_000) -> None:
        """Answers the requests that arrive at `port`; beyond `max_streams` open ones they are `Overloaded`."""

    def client(self, port: Calls) -> Client:
        """The client of `port`; an unlinked optional port has one without peers."""

    def publisher(self, port: Publishes, snapshot: Callable[[], Message]) -> Publisher:
        """The publisher of `port`. `snapshot()` must equal the sum of all events so far."""

    def subscribe(self, port: Subscribes, subscription: Subscription) -> None:
        """Follows `port`."""

    def progress(self, doing: str, fraction: float | None = None) -> None:
        """Shows what this replica is doing while it starts."""

    def notice(self, text: str) -> None:
        """Shows a remark in `graph status` as long as this process lives, in the place of an earlier one."""

    def announce(self, **facts: int) -> None:
        """Lets callers know numbers about this replica, as `Peer.facts`, from when it is ready; called in `start`."""

    def spawn(self, work: Awaitable[None], *, name: str) -> asyncio.Task[None]:
        """Runs background work that ends with the replica; its failure ends the replica."""

    def health(self) -> Health:
        """The whole graph's health, as the registry knows it."""

    async def collect_metrics(self, timeout_s: float) -> bytes:
        """All replicas' metrics in Prometheus text format, labelled `node` and `replica`."""


class Health(msgspec.Struct, frozen=True):
    """`state` is ready (every edge has a live peer), degraded (only optional edges lack one) or down."""

    state: str
    missing: tuple[str, ...] = ()  # "decode.prefill: no ready replica of 'prefill'"
    nodes: dict[str, int] = {}  # node -> ready replicas
