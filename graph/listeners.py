"""The public listening sockets: bound before anything is loaded, kept open across restarts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from graph.bounds import LAST_PORT
from graph.declare import GraphView, NodeView
from graph.errors import LaunchError

BACKLOG = 4096


def bind_listeners(view: GraphView) -> dict[str, socket.socket]:
    """The bound and listening socket of every node that has one, by node.

    They listen at once, for only that claims the port; clients that come early wait. Raises
    `LaunchError`, naming the port, when one cannot be had; nothing stays open then.
    """
    bound: dict[str, socket.socket] = {}
    try:
        for node in view.nodes.values():
            if node.component.listens is not None:
                bound[node.name] = _bind(node)
    except LaunchError:
        for listener in bound.values():
            listener.close()
        raise
    return bound


def url_of(listeners: Mapping[str, socket.socket]) -> str | None:
    """Where the first of them is reached from this machine."""
    for listener in listeners.values():
        host, port = listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return None


def _bind(node: NodeView) -> socket.socket:
    listens = node.component.listens
    assert listens is not None, "the caller has looked"
    host, port = str(node.options[listens.host]), int(node.options[listens.port])
    if not 0 <= port <= LAST_PORT:  # which getaddrinfo would take as another port
        raise LaunchError(f"node {node.name!r} cannot listen on port {port}: it must be from 0 to {LAST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise LaunchError(f"node {node.name!r} cannot listen on {host!r} port {port}: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(_why(node, host, port, error)) from error
    listener.setblocking(False)
    return listener


def _why(node: NodeView, host: str, port: int, error: Exception) -> str:
    advice = f"choose another with --set {node.name}.port=N"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; {advice}, or end what listens there"
    if isinstance(error, PermissionError):
        return f"port {port} on {host} needs privileges; {advice}"
    return f"node {node.name!r} cannot listen on {host} port {port}: {error}"
