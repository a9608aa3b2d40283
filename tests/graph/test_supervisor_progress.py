"""What start-up and status look like on the screen."""

from __future__ import annotations

import io

from rich.console import Console

from graph.progress import Progress, status_table
from graph.registry import State
from graph.status import GraphStatus, NodeStatus, ReplicaStatus


def make_status(state: State, doing: str = "", *, since: float = 100.0) -> GraphStatus:
    replica = ReplicaStatus("decode/0", 17, state, since, "b0", 0, doing)
    return GraphStatus("g", "starting", "http://127.0.0.1:1", {"decode": NodeStatus(1, 0, (replica,))})


def make_console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100), out


def test_plain_lines_tell_each_change_once() -> None:
    console, out = make_console(terminal=False)
    with Progress(console) as progress:
        for status in (make_status("starting", "loading [model]"), make_status("starting", "loading [model]")):
            progress.update(status)
        progress.update(make_status("ready"))

    assert out.getvalue() == "decode/0 starting: loading [model]\ndecode/0 ready\n"


def test_live_lines_tell_for_how_long() -> None:
    console, out = make_console(terminal=True)
    with Progress(console) as progress:
        progress.update(make_status("starting", "loading [model]"), now_s=107.0)

    assert "7 s" in out.getvalue()
    assert "loading [model]" in out.getvalue()


def test_status_table_shows_nodes_without_replicas_and_long_times() -> None:
    console, out = make_console(terminal=False)
    status = make_status("ready", since=0.0)
    console.print(
        status_table(GraphStatus("g", "down", None, {**status.nodes, "prefill": NodeStatus(0, 0, ())}), 7201.0)
    )

    assert "2 h" in out.getvalue()
    assert "prefill" in out.getvalue()
    assert "none" in out.getvalue()
