"""What start-up and status look like on the screen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from graph.explain import print_explanation
from graph.progress import Progress, status_table
from graph.registry import State
from graph.status import GraphStatus, NodeStatus, ReplicaStatus
from graph.tables import print_lines


def make_status(state: State, doing: str = "", *, since: float = 100.0) -> GraphStatus:
    replica = ReplicaStatus("decode/0", 17, state, since, "b0", 0, doing)
    return GraphStatus("g", "starting", "http://127.0.0.1:1", {"decode": NodeStatus(1, 0, (replica,))})


def make_console(*, terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=width), out


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
    nodes = {**status.nodes, "prefill": NodeStatus(0, 0, ())}
    print_lines(status_table(GraphStatus("g", "down", None, nodes), 7201.0), console)

    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["g:", "down"],
        ["replica", "state", "since", "pid", "MiB", "restarts"],
        ["decode/0", "ready", "2", "h", "17", "0"],
        ["prefill", "none"],
    ]


WORDS = "before: killed by SIGKILL after 3 s of service [by hand]\nand more " + "word " * 30


@pytest.mark.parametrize("width", [20, 60, 80, 100])
def test_status_rows_are_cut_at_a_terminal_s_edge(width: int) -> None:
    console, out = make_console(terminal=True, width=width)
    print_lines(status_table(make_status("ready", WORDS), 100.0), console)

    lines = [Text.from_ansi(line).plain for line in out.getvalue().splitlines()]
    assert len(lines) == 3
    assert all(len(line) <= width for line in lines)
    assert lines[2].startswith("decode/0  ready")
    assert lines[2].endswith("…")


def test_status_rows_are_whole_where_there_is_no_terminal() -> None:
    console, out = make_console(terminal=False, width=80)
    print_lines(status_table(make_status("ready", WORDS), 100.0), console)

    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[2].endswith(" ".join(WORDS.split()))


def test_live_rows_do_not_wrap_either() -> None:
    console, out = make_console(terminal=True, width=40)
    with Progress(console) as progress:
        progress.update(make_status("starting", WORDS), now_s=107.0)

    assert "…" in out.getvalue()
    assert "and more" not in out.getvalue()


def test_the_explanation_is_a_row_for_each_worker() -> None:
    load = {"running": 1, "waiting": 2}
    terms = {"missing": 1234.0, "queued": 0.0, "requests": 17.5, "displaced": 0.25}
    worker = {"cached_blocks": 3, "overlap_blocks": 4, "is_full": False, "load": load, "terms": terms, "cost": 1252.0}
    told = {
        "policy": "kv", "prompt_tokens": 100, "prompt_blocks": 6, "tokens_per_block": 16,
        "choice": {"worker": "decode/1", "reason": "least cost " * 20},
        "workers": [{**worker, "worker": f"decode/{i}"} for i in range(2)],
    }  # fmt: skip
    console, out = make_console(terminal=False, width=40)
    print_explanation(told, console)

    lines = out.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0] == "policy kv: 100 tokens, 6 blocks of 16"
    assert lines[2].split()[:2] == ["decode/0", "3"]
    assert lines[3].split()[:2] == ["->", "decode/1"]


def test_an_explanation_of_one_token_tells_one_token() -> None:
    console, out = make_console(terminal=False)
    told = {"policy": "kv", "prompt_tokens": 1, "prompt_blocks": 1, "tokens_per_block": 16, "choice": None}
    print_explanation({**told, "workers": []}, console)
    assert out.getvalue().splitlines()[0] == "policy kv: 1 token, 1 block of 16"
