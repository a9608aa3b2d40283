"""Graph files: found from anywhere, imported without side effects, with errors that name the line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import graph
from graph import Component, DeclarationError
from graph.loader import component_reference, import_component, load_graph

MINE = """
from graph import Component, Graph, Message, Node, Calls, Serves

class Ping(Message, frozen=True, array_like=True, tag=True):
    n: int

class Asker(Component):
    out = Calls(Ping, Ping)

class Answerer(Component):
    into = Serves(Ping, Ping)

asker = Node(Asker)
answerer = Node(Answerer, replicas=2)
g = Graph("mine", asker.out >> answerer.into)
"""


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test adds to the import path ends with it."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def fault(spec: str | Path) -> str:
    with pytest.raises(DeclarationError) as caught:
        load_graph(str(spec))
    return str(caught.value)


@pytest.mark.parametrize("name", ["agg", "disagg"])
def test_the_shipped_graphs_are_found_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded, module = load_graph(f"graph/{name}.py")
    assert loaded.name == name
    assert module.__name__ == f"graph.{name}"


def test_a_file_in_the_working_directory_wins_over_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "graph").mkdir()
    write(tmp_path / "graph", MINE, "agg.py")
    monkeypatch.chdir(tmp_path)
    assert load_graph("graph/agg.py")[0].name == "mine"


def test_a_users_file_named_like_an_installed_package_shadows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, MINE, "graph.py")
    write(tmp_path, "raise RuntimeError('the wrong msgspec')", "msgspec.py")
    monkeypatch.chdir(tmp_path)
    path_before = list(sys.path)
    loaded, _ = load_graph("graph.py")
    assert loaded.name == "mine"
    assert sys.modules["graph"] is graph
    assert sys.path == path_before


@pytest.mark.parametrize("name", ["g", "mine"])
def test_a_graph_is_picked_by_variable_or_by_its_name(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, MINE + 'other = Graph("second", nodes=(asker,))\n')
    assert load_graph(f"{file}:{name}")[0].name == "mine"


def test_one_of_several_graphs_must_be_named(tmp_path: Path) -> None:
    file = write(tmp_path, MINE + 'other = Graph("second", nodes=(asker,))\n')
    assert "several graphs: g, other" in fault(file)
    assert "no graph 'third'; it has g, other" in fault(f"{file}:third")


def test_two_variables_for_one_graph_are_one_graph(tmp_path: Path) -> None:
    assert load_graph(str(write(tmp_path, MINE + "same = g\n")))[0].name == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "declares no graph"),
        ("x = 1\n1 / 0\n", "mine.py:2: ZeroDivisionError"),
        ("def broken(:\n", "mine.py:1: SyntaxError"),
        ("import no_such_module\n", "No module named 'no_such_module'"),
        (MINE + "asker.nothing\n", "Asker has no port 'nothing'; it has out"),
        (MINE + "asker.out >> 3\n", "must be a port of a node"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_message(text: str, words: str, tmp_path: Path) -> None:
    message = fault(write(tmp_path, text))
    assert words in message
    assert "Traceback" not in message


def test_a_file_that_is_not_there_or_is_a_folder(tmp_path: Path) -> None:
    assert "no such file" in fault(tmp_path / "nothing.py")
    assert "is a folder" in fault(tmp_path)


def test_a_text_file_is_no_graph_file(tmp_path: Path) -> None:
    assert "is not a Python file" in fault(write(tmp_path, "hello", "mine.txt"))


def test_a_shipped_component_is_named_by_its_module() -> None:
    _, module = load_graph("graph/disagg.py")
    reference = component_reference(module.decode.component, str(module.__file__))
    assert reference == "components.decode:DecodeWorker"
    assert import_component(reference) is module.decode.component


def test_a_users_component_is_named_by_its_file(tmp_path: Path) -> None:
    file = write(tmp_path, MINE)
    _, module = load_graph(str(file))
    reference = component_reference(module.asker.component, str(file))
    assert reference == f"{file}:Asker"
    assert import_component(reference) is module.asker.component


def test_a_component_beside_the_graph_file_is_named_by_its_own_file(tmp_path: Path) -> None:
    write(tmp_path, "from graph import Component\nclass Helper(Component):\n    pass\n", "a_neighbour.py")
    file = write(tmp_path, "from a_neighbour import Helper\nfrom graph import *\nh = Node(Helper)\n"
                           "g = Graph('n', nodes=(h,))\n")  # fmt: skip
    _, module = load_graph(str(file))
    reference = component_reference(module.h.component, str(file))
    assert reference == f"{tmp_path / 'a_neighbour.py'}:Helper"
    assert issubclass(import_component(reference), Component)


def test_a_nested_component_cannot_be_imported_by_a_replica() -> None:
    class Inner(Component):
        pass

    with pytest.raises(DeclarationError, match="move it to the top"):
        component_reference(Inner, __file__)


def test_a_reference_to_something_else_is_refused() -> None:
    with pytest.raises(DeclarationError, match="defines no component 'Nothing'"):
        import_component("components.decode:Nothing")
