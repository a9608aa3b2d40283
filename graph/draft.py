"""A node's values while they are being collected: typed leaves, each with the origin of its value."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from graph.component import Component, Options
from graph.declare import RESOURCES, NodeView

Path = tuple[str, ...]

_BOUND = re.compile(r"Expected `(?:int|float)` (>=|>|<=|<) (\S+)")
_BOUND_WORDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}


class Leaf(msgspec.Struct, frozen=True):
    """One option, or one option of a group; `default` is `msgspec.NODEFAULT` where the user must set it."""

    type: Any
    default: Any
    help: str = ""
    agrees: bool = False
    env: str | None = None


def leaves_of(options: type[Options]) -> dict[Path, Leaf]:
    """All options of a component by path; an option that is itself an `Options` is a group of them."""
    return dict(_leaves(options, None, ()))


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a mistyped word: the nearest known one, or all of them."""
    words = list(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"it has {', '.join(words) or 'none'}"


def _leaves(options: type[Options], preset: Options | None, prefix: Path) -> Iterator[tuple[Path, Leaf]]:
    for field in msgspec.structs.fields(options):
        default = getattr(preset, field.name) if preset is not None else _default(field)
        plain, meta = _unwrap(field.type)
        path = (*prefix, field.name)
        if isinstance(plain, type) and issubclass(plain, Options):
            yield from _leaves(plain, default if isinstance(default, plain) else None, path)
        else:
            extra = (meta.extra if meta else None) or {}
            help = (meta.description if meta else None) or ""
            yield path, Leaf(field.type, default, help, bool(extra.get("agrees")), extra.get("env"))


def _default(field: msgspec.structs.FieldInfo) -> Any:
    factory = field.default_factory
    return field.default if factory is msgspec.NODEFAULT else factory()


def _unwrap(annotation: Any) -> tuple[Any, msgspec.Meta | None]:
    if get_origin(annotation) is not Annotated:
        return annotation, None
    plain, *metadata = get_args(annotation)  # bounds and what `option` says, in any order
    metas = [m for m in metadata if isinstance(m, msgspec.Meta)]
    return plain, next((m for m in metas if m.extra is not None or m.description is not None), None)


class Draft:
    """The values of one node, resources included. `assign` keeps the old value where the new one does not fit."""

    def __init__(self, name: str, component: type[Component]) -> None:
        self.name = name
        self.component = component
        resources = {"replicas": 1, "gpus": 0.0, "tp": 1, "cores": None}
        self.leaves: dict[Path, Leaf] = {
            (key,): Leaf(RESOURCES[key] if default is not None else RESOURCES[key] | None, default)
            for key, default in resources.items()
        } | leaves_of(component.Options)
        self._values = {path: leaf.default for path, leaf in self.leaves.items()}
        self._origins = dict.fromkeys(self.leaves, "default")

    def knows(self, path: Path) -> bool:
        """Whether `path` is an option or a group of options."""
        return any(known[: len(path)] == path for known in self.leaves)

    def assign(self, path: Path, value: Any, origin: str, text: str | None = None) -> list[str]:
        """Sets an option, or merges a mapping into a group key by key; returns the faults."""
        if path in self.leaves:
            try:
                self._values[path] = _fit(value, text, self.leaves[path].type)
            except msgspec.ValidationError as error:
                shown = text if text is not None else repr(value)
                hint = _allowed(self.leaves[path].type)
                return [f"{self._spell(path)} = {shown} does not fit: {_reason(error)}{hint}"]
            self._origins[path] = origin
            return []
        if not self.knows(path):
            return [self._unknown(path)]
        members = msgspec.structs.asdict(value) if isinstance(value, Options) else value
        if not isinstance(members, Mapping):
            group = ", ".join(".".join(known[len(path) :]) for known in self.leaves if known[: len(path)] == path)
            return [f"{self._spell(path)} is a group of options; set one of {group}"]
        return [fault for key, member in members.items() for fault in self.assign((*path, str(key)), member, origin)]

    def missing(self) -> list[str]:
        """The options that have no default and were not set."""
        return [
            f"node '{self.name}' needs a value for '{'.'.join(path)}'; set it with --set {self._spell(path)}=..."
            for path, value in self._values.items()
            if value is msgspec.NODEFAULT
        ]

    def view(self) -> NodeView:
        """What has been collected so far."""
        options: dict[str, Any] = {}
        for path, value in self._values.items():
            if path[0] not in RESOURCES:
                group = options
                for key in path[:-1]:
                    group = group.setdefault(key, {})
                group[path[-1]] = msgspec.to_builtins(value) if value is not msgspec.NODEFAULT else None
        resources = {key: self._values[key,] for key in RESOURCES}
        origins = {".".join(path): origin for path, origin in self._origins.items()}
        return NodeView(name=self.name, component=self.component, options=options, origins=origins, **resources)

    def _spell(self, path: Path) -> str:
        return ".".join((self.name, *path))

    def _unknown(self, path: Path) -> str:
        known = [".".join(known) for known in self.leaves]
        return (
            f"node '{self.name}' ({self.component.__name__}) has no option '{'.'.join(path)}'; "
            f"{nearest('.'.join(path), known)}"
        )


def _fit(value: Any, text: str | None, annotation: Any) -> Any:
    """`value` as the annotation wants it; what was typed as text may also be read as a plain string is."""
    try:
        return msgspec.convert(value, annotation)
    except msgspec.ValidationError as error:
        if text is None:
            raise
        try:
            return msgspec.convert(text, annotation, strict=False)
        except msgspec.ValidationError as as_text:  # tells more where YAML saw a string, as in -1e3
            raise (as_text if value == text else error) from None


def _reason(error: msgspec.ValidationError) -> str:
    """What is wrong with a value; a bound in words."""
    found = _BOUND.fullmatch(str(error))
    return f"it must be {_BOUND_WORDS[found[1]]} {found[2].removesuffix('.0')}" if found else str(error)


def _allowed(annotation: Any) -> str:
    """The values of a `Literal`, spelled for an error message."""
    plain, _ = _unwrap(annotation)
    members = get_args(plain) if get_origin(plain) in (Union, types.UnionType) else (plain,)
    values = [value for member in members if get_origin(member) is Literal for value in get_args(member)]
    values += ["null"] if values and type(None) in members else []
    return f"; allowed: {', '.join(map(str, values))}" if values else ""
