"""Finding a running graph, and talking to its supervisor."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping

from graph.component import Client
from graph.control import control_port
from graph.errors import DeclarationError, LaunchError
from graph.link import Links, ZeroMQ
from graph.ports import Calls
from graph.rundir import RunningGraph, base_dir, running_graphs


def find_running(name: str | None, environment: Mapping[str, str]) -> RunningGraph:
    """The running graph of that name, or the only one.

    Raises `LaunchError` when there is none, `DeclarationError` when a name must pick one of several.
    """
    found = running_graphs(base_dir(environment))
    names = ", ".join(running.name for running in found)
    if name is not None:
        found = [running for running in found if running.name == name]
        if not found:
            raise LaunchError(f"no graph {name!r} is running; " + (f"there is {names}" if names else "none is"))
    if not found:
        raise LaunchError("no graph is running; start one with: graph serve FILE")
    if len(found) > 1:
        raise DeclarationError(f"several graphs are running; pick one with --graph: {names}")
    return found[0]


@contextlib.asynccontextmanager
async def connected(running: RunningGraph) -> AsyncIterator[Client]:
    """A client of the supervisor's control port."""
    served = control_port()
    calls = Calls(served.requests, served.replies)
    calls.name = served.name
    links = Links(f"cli/{os.getpid()}", f"{os.getpid()}-{time.time_ns()}", transport=ZeroMQ())
    try:
        client = links.client(calls, {running.supervisor.node: served.name})
        links.set_peers([running.supervisor])
        yield client
    finally:
        await links.close()
