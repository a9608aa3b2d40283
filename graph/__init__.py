"""Declare, check, show, serve and scale graphs of components."""

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
    "Graph", "GraphError", "GraphView", "Handler", "Health", "LaunchError", "LinkError", "Listen", "Message", "NoPeer",
    "Node", "NodePort", "NodeView", "Options", "Overloaded", "Peer", "PeerFault", "PeerLost", "ProtocolFault",
    "Publisher", "Publishes", "Receives", "Refused", "RequestCancelled", "Sends", "Serves", "Stream", "Subscribes",
    "Subscription", "option",
]  # fmt: skip
