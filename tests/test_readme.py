"""The README against the disk: the walk, the commands, the variables, the make targets."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from graph.cli import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
WALK = re.findall(r"^\| (\d+) \| `([^`]+)` `(\w+)` \|", README, re.MULTILINE)


def defined_in(path: Path) -> set[str]:
    """The classes and functions at the top of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_walk_is_a_numbered_list() -> None:
    assert [int(step) for step, _, _ in WALK] == list(range(1, len(WALK) + 1))
    assert len(WALK) >= 20


@pytest.mark.parametrize(("path", "name"), [(path, name) for _, path, name in WALK])
def test_each_step_of_the_walk_is_where_the_table_says(path: str, name: str) -> None:
    assert (ROOT / path).is_file()
    assert name in defined_in(ROOT / path)


def test_the_walk_visits_every_component_of_the_disaggregated_graph() -> None:
    from graph.loader import load_graph

    declared, _ = load_graph(str(ROOT / "graph/disagg.py"))
    components = {end.node.component for edge in declared.edges for end in (edge.source, edge.target)}
    homes = {component.__module__.replace(".", "/") + ".py" for component in components}
    assert homes - {"frontends/ingress.py"} <= {path for _, path, _ in WALK}  # its files are the first three


def test_every_file_the_readme_names_exists() -> None:
    named = set(re.findall(r"`((?:graph|frontends|components|tests|deploy)/[\w/.]+\.py)`", README))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_command_is_told_and_none_else() -> None:
    told = set(re.findall(r"^ {4}graph (\w+)", README, re.MULTILINE))
    assert told == set(cli.commands)


def test_every_make_target_that_is_told_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", README)) <= targets


def test_every_environment_variable_of_an_option_is_told() -> None:
    from components.decode import DecodeOptions
    from frontends.processor import ProcessorOptions
    from graph.draft import leaves_of

    leaves = [*leaves_of(DecodeOptions).values(), *leaves_of(ProcessorOptions).values()]
    variables = {leaf.env for leaf in leaves if leaf.env}
    assert len(variables) >= 3
    assert variables <= set(re.findall(r"`(HEADRACE_\w+)`", README))
