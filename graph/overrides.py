"""What changes a graph without editing it: the environment, YAML files and flags, as one list of settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from graph.errors import DeclarationError

ANY = "*"
"""In a setting's `node`: every node that has the option."""


class Setting(msgspec.Struct, frozen=True):
    """One value for one option, or a mapping for a group of them. Later settings win.

    `text` is what the user typed, where the value came from a string; a string option takes it as it is.
    """

    node: str
    path: tuple[str, ...]
    value: Any
    origin: str  # as `NodeView.origins` tells it
    text: str | None = None


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """All that one command line says about options, read but not yet applied.

    `host` and `port` go to the node that listens, whatever its options are called.
    """

    environ: Mapping[str, str] = {}
    settings: tuple[Setting, ...] = ()
    host: str | None = None
    port: int | None = None


def read_overrides(
    *,
    files: Iterable[Path] = (),
    sets: Iterable[str] = (),
    model: str | None = None,
    host: str | None = None,
    port: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Overrides:
    """Reads everything once, weakest first. Called by the CLI; raises `DeclarationError`."""
    settings = [setting for file in files for setting in _from_yaml(file)]
    if model is not None:
        settings.append(Setting(ANY, ("model",), model, "--model", model))
    settings += [_from_flag(text) for text in sets]
    return Overrides(environ=dict(environ or {}), settings=tuple(settings), host=host, port=port)


def parse_scalar(text: str) -> Any:
    """A value as YAML reads it: 3, true, null, [1, 2], anything else a string."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _from_flag(text: str) -> Setting:
    """`node.option=value`, with further dots into groups of options."""
    target, equals, value = text.partition("=")
    node, *path = target.strip().split(".")
    if not (equals and node and path and all(path)):
        raise DeclarationError(f"--set {text}: is not of the form node.option=value, such as --set decode.replicas=2")
    return Setting(node, tuple(path), parse_scalar(value), "--set", value)


def _from_yaml(file: Path) -> Iterator[Setting]:
    """`node: {option: value}` for any number of nodes."""
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeclarationError(f"-f {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DeclarationError(f"-f {file}: is not YAML: {error}") from error
    if not isinstance(document, dict | None):
        raise DeclarationError(f"-f {file}: must hold 'node: {{option: value}}' at its top level")
    for node, options in (document or {}).items():
        if not isinstance(options, dict):
            raise DeclarationError(f"-f {file}: {node}: must be a mapping of options, such as {node}: {{replicas: 2}}")
        for option, value in options.items():
            yield Setting(str(node), tuple(str(option).split(".")), value, str(file))
