"""Graph files: from FILE[:name] to the declared graph, and from a component class to the name a replica imports."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from graph.component import Component
from graph.declare import Graph
from graph.errors import DeclarationError


def load_graph(spec: str) -> tuple[Graph, ModuleType]:
    """The graph that `FILE[:name]` declares, and the module that declares it.

    Called once by the CLI. `name` is the variable that holds the graph, or the graph's own name; it
    is needed only where a file declares several. Raises `DeclarationError` for whatever is wrong.
    """
    path, name = split_spec(spec)
    module = import_file(path)
    return _pick(module, path, name), module


def split_spec(spec: str) -> tuple[Path, str | None]:
    """The absolute file and the graph's name in `FILE[:name]`; the file must exist.

    A relative FILE is looked up in the working directory, then beside the installed packages, so that
    `graph/agg.py` names the shipped graph from anywhere.
    """
    file, _, name = spec.partition(":") if ":" in spec and not Path(spec).exists() else (spec, "", "")
    installed = Path(__file__).parent.parent
    for path in (Path(file), installed / file):
        if path.is_file():
            return path.resolve(), name or None
    if Path(file).is_dir():
        raise DeclarationError(f"'{file}' is a folder; name the graph file in it, such as {file.rstrip('/')}/graph.py")
    raise DeclarationError(f"no such file: '{file}'; the shipped graphs are graph/agg.py and graph/disagg.py")


def component_reference(component: type[Component], file: str) -> str:
    """What a replica process imports to get `component`: "package.module:Class" or "/abs/file.py:Class".

    The path form is for classes that only a graph file, or a module beside it, brings along. `file` is
    the graph file, the home of a class whose own module tells no file.
    """
    module = sys.modules.get(component.__module__)
    origin = getattr(module, "__file__", None) or file
    if "." in component.__qualname__:
        raise DeclarationError(
            f"{component.__qualname__} is defined inside another class or function; "
            f"move it to the top of {Path(origin).name} so that a replica can import it"
        )
    if _is_importable(component.__module__, Path(origin)):
        return f"{component.__module__}:{component.__name__}"
    return f"{Path(origin).resolve()}:{component.__name__}"


def import_component(reference: str) -> type[Component]:
    """The class that `component_reference` named. Called once, by the replica process, at its start.

    The folder of a file outside the installed packages stays importable for good, behind everything
    else: the component may import its neighbours later.
    """
    home, _, name = reference.rpartition(":")
    if home.endswith(".py"):
        module = import_file(Path(home))
        folder = str(_root(Path(home)))
        if folder not in sys.path:
            sys.path.append(folder)
    else:
        module = importlib.import_module(home)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Component)):
        raise DeclarationError(f"{home} defines no component {name!r}")
    return found


def import_file(path: Path) -> ModuleType:
    """Imports a Python file as the installed module it is, or under a name no package can have.

    Its neighbours can be imported while it is executed, but never shadow anything installed.
    """
    if _private_name(path) in sys.modules:
        return sys.modules[_private_name(path)]
    dotted = _dotted(path)
    try:
        if _is_importable(dotted, path):
            return importlib.import_module(dotted)
        with _neighbours(_root(path)):
            if "." in dotted and _is_importable(dotted, path):
                return importlib.import_module(dotted)
            return _execute(path)
    except DeclarationError as error:
        raise DeclarationError(f"{_where(path, error)}: {error}") from error
    except Exception as error:  # a graph file is the user's code: whatever it raises is told by its line
        raise DeclarationError(f"{_where(path, error)}: {type(error).__name__}: {error}") from error


def _private_name(path: Path) -> str:
    return f"graph_file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}_{path.stem}"


def _execute(path: Path) -> ModuleType:
    name = _private_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise DeclarationError("is not a Python file; a graph file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations of the classes in it are looked up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _pick(module: ModuleType, path: Path, name: str | None) -> Graph:
    """The graph that is meant among those the module's variables hold."""
    held = {variable: value for variable, value in vars(module).items() if isinstance(value, Graph)}
    known = ", ".join(held)
    if not held:
        raise DeclarationError(f"{path} declares no graph; assign one at the top level: graph = Graph('name', ...)")
    if name is not None:
        matches = [g for variable, g in held.items() if name in (variable, g.name)]
        if not matches:
            raise DeclarationError(f"{path} declares no graph {name!r}; it has {known}")
        return held.get(name, matches[0])
    if len({id(g) for g in held.values()}) > 1:
        raise DeclarationError(
            f"{path} declares several graphs: {known}; name one, such as {path.name}:{next(iter(held))}"
        )
    return next(iter(held.values()))


def _root(path: Path) -> Path:
    """The folder from which the file's outermost package, or the file itself, is imported."""
    folder = path.resolve().parent
    while (folder / "__init__.py").exists():
        folder = folder.parent
    return folder


def _dotted(path: Path) -> str:
    path = path.resolve()
    return ".".join(path.relative_to(_root(path)).with_suffix("").parts)


def _is_importable(dotted: str, path: Path) -> bool:
    """Whether a fresh process with the same `sys.path` would find `path` under that name."""
    top, _, rest = dotted.partition(".")
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(top, None) if find else None
        if spec is not None:
            return bool(spec.origin) and _below(Path(spec.origin), rest) == path.resolve()
    return False


def _below(origin: Path, rest: str) -> Path:
    """The file of submodule `rest` of the top-level module or package that lies at `origin`."""
    if not rest:
        return origin.resolve()
    package = origin.resolve().parent.joinpath(*rest.split("."))
    return package / "__init__.py" if (package / "__init__.py").exists() else package.with_suffix(".py")


@contextmanager
def _neighbours(folder: Path) -> Iterator[None]:
    """Makes the modules in `folder` importable for a while, behind everything that is installed."""
    entry = str(folder)
    if entry in sys.path:
        yield
        return
    sys.path.append(entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _where(path: Path, error: BaseException) -> str:
    """`file:line` of the last line of the graph file that led to `error`."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    lines = [
        f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()
    ]
    return f"{path}:{lines[-1]}" if lines else str(path)
