"""The router: which workers serve a request."""

from __future__ import annotations

from typing import Annotated, Literal

from components.messages import Placement, PlacementRequest, WorkerEvents, WorkerSnapshot
from graph import Component, Options, Serves, Subscribes, option


class RouterOptions(Options, frozen=True, kw_only=True):
    """Options of the router."""

    policy: Annotated[Literal["round_robin", "least_busy"], option("how a worker is chosen")] = "least_busy"


class Router(Component):
    """Places requests on workers. Never in the token path."""

    Options = RouterOptions
    placement = Serves(PlacementRequest, Placement)
    events = Subscribes(WorkerEvents, WorkerSnapshot, required=True)
