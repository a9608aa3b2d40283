"""What the CLI's commands do: serve a graph, or talk to one that runs. Each returns the exit status.

0: done; 1: it did not work out; 2: called wrongly, nothing was touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import msgspec
from rich.console import Console

from graph.component import Client
from graph.control import Command, Drain, GetStatus, Restart, Scale, StatusReply, Stop, Told
from graph.declare import GraphView
from graph.errors import DeclarationError, GraphError, LaunchError, LinkError
from graph.finding import connected, find_running
from graph.logs import follow_logs, log_files, print_logs
from graph.policy import DRAIN_TIMEOUT_S
from graph.progress import last_words, status_table
from graph.registry import SUPERVISOR
from graph.rundir import RunDir, RunningGraph, base_dir, log_path
from graph.status import GraphStatus
from graph.tables import print_lines

_ANSWER_TIMEOUT_S = 10.0
_COMMAND_TIMEOUT_S = 3_600.0  # for each next line; loading a large model takes long
_WATCH_S = 1.0

Work = Callable[[Client], Awaitable[int]]
"""Talks to the supervisor, and returns the exit status."""


def serve(view: GraphView, *, launcher: str, detach: bool) -> int:
    """Runs the graph until its end, or, with `detach`, until it is ready."""
    from graph.detach import run_detached
    from graph.listeners import bind_listeners
    from graph.resources import FEW_FILES, raise_file_limit
    from graph.serving import run_graph

    if launcher != "local":
        return _fail(f"there is no launcher {launcher!r}; use --on local", 2)
    if (num_files := raise_file_limit()) < FEW_FILES:
        warning = f"a process may open {num_files} files only, one for each connection; raise it with ulimit -n"
        click.echo(f"warning: {warning}", err=True)
    try:
        listeners = bind_listeners(view)
    except LaunchError as error:
        return _fail(str(error))

    def run(on_ready: Callable[[Path], None]) -> int:
        def ready(run_dir: RunDir) -> None:
            on_ready(log_path(run_dir.path, SUPERVISOR))

        try:
            return run_graph(view, listeners, Console(), ready)
        except GraphError as error:
            return _fail(str(error))

    return run_detached(run) if detach else run(lambda _: None)


def status(graph: str | None, as_json: bool, watch: bool) -> int:
    """Prints the status once, or keeps a table up to date until Ctrl-C."""

    async def show(client: Client) -> int:
        while True:
            current = await _status(client)
            if as_json:
                click.echo(msgspec.json.encode(current).decode())
            else:
                print_lines(status_table(current, time.time()), console)
                for words in last_words(current):
                    console.print(words, highlight=False, markup=False, soft_wrap=True)
            if not watch:
                return 0
            await asyncio.sleep(_WATCH_S)
            if console.is_terminal:
                console.clear()

    console = Console()
    with contextlib.suppress(KeyboardInterrupt):
        return _talk(graph, show)
    return 0


def scale(graph: str | None, targets: list[str], wait: bool) -> int:
    """Changes replica counts; with `wait`, returns when all are ready or gone."""
    return _talk(graph, _command(Scale(tuple(targets), wait)))


def restart(graph: str | None, target: str) -> int:
    """Restarts a replica, or all of a node one after another."""
    return _talk(graph, _command(Restart(target)))


def drain(graph: str | None, target: str) -> int:
    """Lets a replica finish its work and leave."""
    return _talk(graph, _command(Drain(target)))


def explain(graph: str | None, message: str, as_json: bool) -> int:
    """Prints where a message would go now, and why there."""
    from graph.explain import ask, print_explanation

    async def show(client: Client) -> int:
        url = (await _status(client)).url
        if url is None:
            return _fail("this graph has no HTTP address to ask")
        told = await asyncio.to_thread(ask, url, message)
        if as_json:
            click.echo(msgspec.json.encode(told).decode())
        else:
            print_explanation(told, Console())
        return 0

    return _talk(graph, show)


def logs(graph: str | None, target: str | None, follow: bool) -> int:
    """Prints the logs of a replica, a node or all; with `follow`, what is added to them as well."""
    try:
        running = find_running(graph, os.environ)
        files = log_files(base_dir(os.environ) / running.name / "logs", target)
    except DeclarationError as error:
        return _fail(str(error), 2)
    except GraphError as error:
        return _fail(str(error))
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        if follow:
            follow_logs(base_dir(os.environ) / running.name / "logs", target, is_alive=_alive(running.pid))
        else:
            print_logs(files)
    return 0


def stop(graph: str | None) -> int:
    """Ends the graph as its first Ctrl-C does; returns when its process is gone."""
    gone: list[int] = []

    async def ask(client: Client) -> int:
        await client.call(Stop(), peer=SUPERVISOR, timeout_s=_ANSWER_TIMEOUT_S)
        return 0

    try:
        running = find_running(graph, os.environ)
        with contextlib.suppress(ProcessLookupError):
            gone.append(os.pidfd_open(running.pid))
    except DeclarationError as error:
        return _fail(str(error), 2)
    except GraphError as error:
        return _fail(str(error))
    try:
        code = _talk(running.name, ask)
        if code == 0 and gone and not select.select(gone, [], [], DRAIN_TIMEOUT_S + 15)[0]:
            return _fail(f"{running.name} (pid {running.pid}) still runs; end it with: kill {running.pid}")
        if code == 0:
            click.echo(f"{running.name} stopped")
        return code
    finally:
        for pidfd in gone:
            os.close(pidfd)


def _command(command: Command) -> Work:
    async def work(client: Client) -> int:
        call = client.open(command, peer=SUPERVISOR, timeout_s=_COMMAND_TIMEOUT_S)
        async for reply in call:
            if isinstance(reply, Told):
                click.echo(reply.text)
        return 0

    return work


async def _status(client: Client) -> GraphStatus:
    reply = await client.call(GetStatus(), peer=SUPERVISOR, timeout_s=_ANSWER_TIMEOUT_S)
    assert isinstance(reply, StatusReply)
    return reply.status


def _talk(graph: str | None, work: Work) -> int:
    """Runs `work` with a client of the running graph's supervisor; faults become a message and a status."""
    try:
        return asyncio.run(_connected(find_running(graph, os.environ), work))
    except DeclarationError as error:
        return _fail(str(error), 2)
    except LinkError as error:
        return _fail(str(error), 2 if error.code == "bad_request" else 1)
    except GraphError as error:
        return _fail(str(error))


async def _connected(running: RunningGraph, work: Work) -> int:
    async with connected(running) as client:
        return await work(client)


def _alive(pid: int) -> Callable[[], bool]:
    return lambda: os.path.exists(f"/proc/{pid}")


def _fail(message: str, code: int = 1) -> int:
    click.echo(f"error: {message}", err=True)
    return code
