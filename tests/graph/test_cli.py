"""The `graph` command: its tree, its exit codes, its start-up time."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from graph import cli as command_line
from graph import commands
from graph.cli import main

MINE = """
from graph import Component, Graph, Message, Node, Calls, Serves, Options

class Ping(Message, frozen=True, array_like=True, tag=True):
    n: int

class Asker(Component):
    out = Calls(Ping, Ping)

class AnswererOptions(Options, frozen=True, kw_only=True):
    patience_ms: int = 10

class Answerer(Component):
    Options = AnswererOptions
    into = Serves(Ping, Ping)

asker = Node(Asker)
answerer = Node(Answerer, replicas=2)
graph = Graph("mine", asker.out >> answerer.into)
broken = Graph("broken", nodes=(asker,))
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    """A user's graph file with a user's components."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return str(file)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The command's exit code, output and errors."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err


def test_a_good_graph_passes_the_check(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check", f"{mine}:graph") == (0, "mine: 2 nodes, 1 edge, no faults\n", "")


def test_every_fault_is_printed_and_the_code_is_1(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", f"{mine}:broken", "--set", "askr.replicas=2", "--set", "asker.replicas=-1")
    assert (code, out) == (1, "")
    assert [line.partition(":")[0] for line in err.splitlines()] == ["warning", "fault", "fault", "fault"]
    assert "did you mean 'asker'?" in err


def test_a_file_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "check", "nowhere.py")
    assert code == 1
    assert err.startswith("graph: no such file: 'nowhere.py'")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("check",),
        ("show", "x.py", "--format", "svg"),
        ("serve", "x.py", "--port", "70000"),
        ("scale",),
        ("check", "graph/agg.py", "--set", "worker"),
        ("check", "graph/agg.py", "-f", "nowhere.yaml"),
    ],
)
def test_called_wrongly_is_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *arguments)[0] == 2


def test_ray_is_not_there_yet(mine: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "serve", f"{mine}:graph", "--on", "ray")
    assert code == 2
    assert "not there yet" in err


def test_a_faulty_graph_is_not_served(
    mine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[object] = []
    monkeypatch.setattr(commands, "serve", lambda *a, **k: served.append(a))
    assert run(capsys, "serve", f"{mine}:broken")[0] == 1
    assert served == []


def test_overrides_of_every_kind_reach_the_graph(mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "o.yaml").write_text("answerer: {patience_ms: 20}\n")
    arguments = ("-f", str(tmp_path / "o.yaml"), "--set", "answerer.replicas=3", "--format", "json", "--config")
    code, out, _ = run(capsys, "show", f"{mine}:graph", *arguments)
    node = json.loads(out)["nodes"]["answerer"]
    assert code == 0
    assert node["replicas"] == 3
    assert node["options"]["patience_ms"] == {"value": 20, "origin": str(tmp_path / "o.yaml")}


@pytest.mark.parametrize(
    ("arguments", "name", "called"),
    [
        (("status", "--json"), "status", (None, True, False)),
        (("status", "--graph", "a", "--watch"), "status", ("a", False, True)),
        (("scale", "decode=-1", "prefill=+2"), "scale", (None, ["decode=-1", "prefill=+2"], True)),
        (("scale", "a=0", "--no-wait", "--graph", "g"), "scale", ("g", ["a=0"], False)),
        (("restart", "decode"), "restart", (None, "decode")),
        (("drain", "decode/0"), "drain", (None, "decode/0")),
        (("logs",), "logs", (None, None, False)),
        (("logs", "decode/1", "-f"), "logs", (None, "decode/1", True)),
        (("stop",), "stop", (None,)),
    ],
)
def test_commands_for_a_running_graph_are_passed_on_with_their_exit_code(
    arguments: tuple[str, ...],
    name: str,
    called: tuple[object, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[object, ...]] = []

    def fake(*arguments: object) -> int:
        seen.append(arguments)
        return 7

    monkeypatch.setattr(commands, name, fake)
    assert run(capsys, *arguments)[0] == 7
    assert seen == [called]


def test_serve_gets_the_checked_view(
    mine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[object, dict[str, object]]] = []

    def fake(view: object, **options: object) -> int:
        seen.append((view, options))
        return 0

    monkeypatch.setattr(commands, "serve", fake)
    assert run(capsys, "serve", f"{mine}:graph", "--detach")[0] == 0
    [(view, options)] = seen
    assert view.name == "mine"  # type: ignore[attr-defined]
    assert options == {"launcher": "local", "detach": True}


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(command_line.cli, ["--help"])
    assert result.exit_code == 0
    for name in ("check", "show", "serve", "status", "scale", "restart", "drain", "logs", "stop"):
        assert f"  {name} " in result.output


def test_help_answers_at_once() -> None:
    """0.3 s of CPU time, the interpreter's start included: the machine may be busy with other tests."""
    script = Path(sys.executable).with_name("graph")
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([script, "--help"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.3


def test_the_command_does_not_import_from_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text("raise RuntimeError('imported from the working directory')")
    script = Path(sys.executable).with_name("graph")
    result = subprocess.run(
        [script, "check", "graph/agg.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "agg: 4 nodes, 4 edges, no faults\n"), result.stderr
