"""The walls: imports go one way, each foreign package has its owners, and declaring loads nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("graph", "components", "frontends")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
GRAPH_FILES = {"graph/agg.py", "graph/disagg.py"}

MAY_IMPORT = {"graph": set(), "components": {"graph"}, "frontends": {"graph", "components"}}
"""Below the text side there are only token ids, below the token side no word of models."""

LEVELS = {
    "messages": 0,
    "options": 0,
    "rules": 0,
    "file_lock": 0,
    "model_cache": 0,
    "kv": 1,
    "engine": 2,
    "transfer": 2,
}
WORKERS = 3
"""What is not listed is the running worker's or the router's; peers of one level below never import each other."""

ENDS = ({"router", "routing"}, {"prefill", "prefill_prompts"}, {"decode", "decode_requests"}, {"worker"})
"""The ends of the token side: they meet in messages only."""

OWNERS = {
    "zmq": ("graph/link/zeromq.py",),
    "yaml": ("graph/overrides.py",),
    "setproctitle": ("graph/child.py",),
    "uvloop": ("graph/replica.py",),
    "nixl": ("components/transfer/nixl.py",),
    "torch": (
        "components/engine/",
        "components/model_cache.py",
        "components/transfer/nixl.py",
        "components/transfer/device.py",
    ),
    "transformers": ("components/engine/", "components/model_cache.py"),
    "uvicorn": ("frontends/http_server.py",),
    "tokenizers": ("frontends/text/",),
    "jinja2": ("frontends/text/template.py",),
    "pydantic": ("frontends/text/",),
    "pickle": (),
}
"""Who alone may import a foreign package; a name that ends in a slash is a folder."""

HEAVY = ("torch", "transformers", "nixl", "flashinfer")
WEB = ("uvicorn", "httptools", "pydantic", "jinja2", "tokenizers")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """The modules a file imports anywhere in it, those for type checkers included."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def package_of(path: Path) -> str:
    return name_of(path).partition("/")[0]


def part_of(dotted: str) -> str:
    """The part of `components` that a module belongs to: "messages", "kv", "decode"."""
    return dotted.split(".")[1] if "." in dotted else ""


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 20


def upward(path: Path) -> Iterator[str]:
    """What a file of the token side imports from above, beside, or another end."""
    own = part_of(module_of(path))
    level = LEVELS.get(own, WORKERS)
    for name in imports_of(path):
        other = part_of(name)
        if not name.startswith("components.") or other == own:
            continue
        other_level = LEVELS.get(other, WORKERS)
        own_end, other_end = (next((end for end in ENDS if part in end), None) for part in (own, other))
        if other_level > level or (other_level == level and 0 < level < WORKERS) or other_end not in (None, own_end):
            yield f"{name_of(path)} imports {name}"


def test_packages_import_one_way() -> None:
    wrong = [
        f"{name_of(path)} imports {name}"
        for path in SOURCES
        if name_of(path) not in GRAPH_FILES
        for name in imports_of(path)
        if (top := name.partition(".")[0]) in PACKAGES and top not in MAY_IMPORT[package_of(path)] | {package_of(path)}
    ]
    assert not wrong


def test_nobody_imports_the_graph_files() -> None:
    assert not [
        name_of(path) for path in SOURCES for name in imports_of(path) if name.startswith(("graph.agg", "graph.disagg"))
    ]


def test_the_token_side_imports_downwards() -> None:
    files = [path for path in SOURCES if package_of(path) == "components" and part_of(module_of(path))]
    assert files
    assert not [line for path in files for line in upward(path)]


@pytest.mark.parametrize("package", sorted(OWNERS))
def test_each_foreign_package_has_its_owners(package: str) -> None:
    users = {name_of(path) for path in SOURCES if package in {name.partition(".")[0] for name in imports_of(path)}}
    strangers = [u for u in users if not any(u == o or (o.endswith("/") and u.startswith(o)) for o in OWNERS[package])]
    assert not strangers


def test_the_sdk_imports_no_model_and_no_web_framework() -> None:
    for path in sorted((ROOT / "graph").rglob("*.py")):
        assert not {name.partition(".")[0] for name in imports_of(path)} & {*HEAVY, *WEB}, name_of(path)


def test_messages_are_packed_in_one_file() -> None:
    users = [name_of(path) for path in SOURCES if "msgspec.msgpack" in path.read_text(encoding="utf-8")]
    assert users == ["graph/link/codec.py"]


@pytest.mark.parametrize(
    "module", ["graph", "graph.cli", "frontends.ingress", "frontends.processor", "graph.agg", "graph.disagg"]
)
def test_declaring_loads_nothing_heavy(module: str) -> None:
    """In a fresh interpreter: the ingress and `graph check` must stay small."""
    script = f"import sys, {module}; print(*sorted(name for name in {HEAVY} if name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "\n"


def test_component_classes_of_a_graph_load_nothing_heavy() -> None:
    script = (
        "import sys, graph.disagg, graph.agg\n"
        "from graph.config import resolve\nfrom graph.overrides import Overrides\n"
        "resolve(graph.disagg.graph, graph.disagg, Overrides())\n"
        f"print(*[name for name in {(*HEAVY, *WEB, 'zmq')} if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "\n"


def test_importing_the_sdk_takes_under_300_ms_of_cpu() -> None:
    script = "import time; t = time.process_time(); import graph; print(time.process_time() - t)"
    took = [
        float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout) for _ in "123"
    ]
    assert min(took) < 0.3


def test_files_say_what_they_are_and_stay_readable() -> None:
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(text)), f"{name_of(path)}: the first line says what the file is"
        assert text.count("\n") <= 400, f"{name_of(path)} is long"


def test_functions_fit_a_screen() -> None:
    long = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno > 60
    ]
    assert not long
