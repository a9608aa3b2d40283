"""The replicas' logs, as `graph logs` prints them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click

from graph.errors import DeclarationError

_POLL_S = 0.25
_FIRST_BYTES = 64 << 10


def log_files(folder: Path, target: str | None) -> list[Path]:
    """The logs of `NODE/I`, of `NODE`, or all; raises `DeclarationError` naming those there are."""
    every = sorted(folder.glob("*.log"))
    if target is None:
        return every
    stem = target.replace("/", "-")
    found = [log for log in every if stem in (log.stem, log.stem.rpartition("-")[0])]
    if not found:
        raise DeclarationError(f"no log of {target!r}; there are {', '.join(map(_name, every))}")
    return found


def print_logs(files: list[Path]) -> None:
    """Prints whole logs, each line with its replica's name where there are several."""
    for file in files:
        older = file.with_name(file.name + ".1")
        data = (older.read_bytes() if older.exists() else b"") + file.read_bytes()
        _echo(file, data, with_name=len(files) > 1)


def follow_logs(folder: Path, target: str | None, *, is_alive: Callable[[], bool]) -> None:
    """Prints the ends of the logs and then what is added, until the graph has ended."""
    read: dict[Path, int] = {}
    while True:
        last_round = not is_alive()
        for file in log_files(folder, target) if folder.is_dir() else []:
            size = file.stat().st_size
            start = read.get(file, max(0, size - _FIRST_BYTES))
            start = 0 if size < start else start  # it was cut short: what it holds now is new
            with file.open("rb") as source:
                source.seek(start)
                data = source.read()
            whole = data[: data.rfind(b"\n") + 1]
            read[file] = start + len(whole)
            _echo(file, whole, with_name=len(read) > 1 or target is None)
        if last_round:
            return
        time.sleep(_POLL_S)


def _echo(file: Path, data: bytes, *, with_name: bool) -> None:
    prefix = f"{_name(file)} | " if with_name else ""
    for line in data.decode(errors="replace").splitlines():
        click.echo(prefix + line)


def _name(log: Path) -> str:
    node, _, index = log.stem.rpartition("-")
    return f"{node}/{index}"
