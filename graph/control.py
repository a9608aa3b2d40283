"""The control port: what replicas and the CLI ask the supervisor.

A command is a request whose stream brings `Told` lines while it is carried out and ends with
`Done`, or with `Refused` (code "bad_request": nothing was touched; "failed": it did not work out).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from graph.component import Stream
from graph.errors import DeclarationError, LaunchError, Refused
from graph.ports import Message, Serves
from graph.registry import CollectMetrics, Join, MetricsText, Noted, Report, supervisor_port
from graph.status import GraphStatus
from graph.supervisor import Supervisor


class GetStatus(Message, frozen=True, array_like=True, tag=True):
    """The graph's status, please."""


class StatusReply(Message, frozen=True, array_like=True, tag=True):
    """The status now."""

    status: GraphStatus


class Scale(Message, frozen=True, array_like=True, tag=True):
    """Change the replica counts; with `wait` the stream ends when all are there or gone."""

    targets: tuple[str, ...]
    wait: bool


class Restart(Message, frozen=True, array_like=True, tag=True):
    """Restart `NODE/I`, or all replicas of `NODE` one after another."""

    target: str


class Drain(Message, frozen=True, array_like=True, tag=True):
    """Let `NODE/I` finish its work and leave."""

    target: str


class Stop(Message, frozen=True, array_like=True, tag=True):
    """End the graph as the first Ctrl-C does; answered at once."""


class Told(Message, frozen=True, array_like=True, tag=True):
    """One line about a command's progress."""

    text: str


class Done(Message, frozen=True, array_like=True, tag=True):
    """The command is carried out."""


Command = Scale | Restart | Drain
"""What takes a while."""

REQUESTS = (GetStatus, Scale, Restart, Drain, Stop)
REPLIES = (StatusReply, Told, Done)


def control_port() -> Serves:
    """The port that the supervisor serves to the CLI."""
    port = Serves(REQUESTS, REPLIES)
    port.name = "supervisor.control"
    return port


def serve_control(supervisor: Supervisor, stop: Callable[[], None]) -> None:
    """Opens both of the supervisor's ports. `stop` begins the graph's end. Called once, before any replica starts."""

    def on_registry(request: Join | Report | CollectMetrics, stream: Stream) -> Awaitable[None] | None:
        if isinstance(request, CollectMetrics):
            return _collect(supervisor, request.timeout_s, stream)
        if isinstance(request, Report):
            return _note(supervisor, request, stream)
        unwatch = supervisor.registry.watch(stream.send)
        stream.on_cancel(unwatch)
        return None

    def on_control(request: GetStatus | Command | Stop, stream: Stream) -> Awaitable[None] | None:
        if isinstance(request, GetStatus):
            stream.end(StatusReply(supervisor.status()))
        elif isinstance(request, Stop):
            stream.end(Done())
            stop()
        else:
            return _carry_out(supervisor, request, stream)
        return None

    supervisor.links.serve(supervisor_port(), on_registry)
    supervisor.links.serve(control_port(), on_control)


async def _collect(supervisor: Supervisor, timeout_s: float, stream: Stream) -> None:
    stream.end(MetricsText(await supervisor.collect_metrics(timeout_s)))


async def _note(supervisor: Supervisor, report: Report, stream: Stream) -> None:
    managed = supervisor.replicas.get(stream.peer)
    if managed is not None:
        managed.take(report)
    if managed is None or report.state != "draining":
        stream.end(Noted())
        return
    await supervisor.all_seen()
    stream.end(Noted(managed.drain_left_s))


async def _carry_out(supervisor: Supervisor, command: Command, stream: Stream) -> None:
    def tell(text: str) -> None:
        stream.send(Told(text))

    try:
        match command:
            case Scale(targets, wait):
                await supervisor.scale(targets, tell, wait=wait)
            case Restart(target):
                await supervisor.restart(target, tell)
            case Drain(target):
                await supervisor.drain(target, tell)
    except DeclarationError as error:
        stream.fail(Refused(str(error), code="bad_request"))
    except LaunchError as error:
        stream.fail(Refused(str(error), code="failed"))
    else:
        stream.end(Done())
