"""Declare, check, show, serve and scale graphs of components. Names load on first use, so that the command starts
at once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph.bounds import Natural, Positive, Share, TcpPort, Time, Timeout
    from graph.component import (
        Call,
        Client,
        Component,
        Context,
        Handler,
        Health,
        Listen,
        Options,
        Peer,
        Publisher,
        Stream,
        Subscription,
        option,
    )
    from graph.declare import Edge, EdgeView, Graph, GraphView, Node, NodePort, NodeView
    from graph.errors import (
        DeadlineExceeded,
        DeclarationError,
        GraphError,
        LaunchError,
        LinkError,
        NoPeer,
        Overloaded,
        PeerFault,
        PeerLost,
        ProtocolFault,
        Refused,
        RequestCancelled,
    )
    from graph.ports import Calls, Message, Publishes, Receives, Sends, Serves, Subscribes

__all__ = [
    "Call", "Calls", "Client", "Component", "Context", "DeadlineExceeded", "DeclarationError", "Edge", "EdgeView",
    "Graph", "GraphError", "GraphView", "Handler", "Health", "LaunchError", "LinkError", "Listen", "Message",
    "Natural", "NoPeer", "Node", "NodePort", "NodeView", "Options", "Overloaded", "Peer", "PeerFault", "PeerLost",
    "Positive", "ProtocolFault", "Publisher", "Publishes", "Receives", "Refused", "RequestCancelled", "Sends", "Serves",
    "Share", "Stream", "Subscribes", "Subscription", "TcpPort", "Time", "Timeout", "option",
]  # fmt: skip

_HOMES = ("bounds", "component", "declare", "errors", "ports")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            found = getattr(import_module(f"graph.{home}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module 'graph' has no attribute {name!r}")
