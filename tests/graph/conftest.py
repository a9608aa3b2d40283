"""Starts toy graphs as a user does: `graph serve` in a process of its own, in a run folder of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from graph.control import GetStatus, StatusReply
from graph.finding import connected, find_running

TOYS = Path(__file__).with_name("toys.py")
GRAPH = Path(sys.executable).with_name("graph")


class Toy:
    """One `graph serve toys.py` and what can be seen of it from outside."""

    command = (str(GRAPH),)

    def __init__(
        self, runtime: Path, *arguments: str, gpus: str | None = None, limit_files: tuple[int, int] | None = None
    ) -> None:
        self.runtime = runtime
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
        if gpus is not None:
            self.environment["CUDA_VISIBLE_DEVICES"] = gpus
        self.output = runtime / f"output-{time.monotonic_ns()}"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*_limited(limit_files), GRAPH, "serve", str(TOYS), *arguments],
                env=self.environment,
                stdout=output,
                stderr=output,
            )

    def text(self) -> str:
        return self.output.read_text()

    def until(self, holds: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        """Waits until `holds()` is true and returns it; fails with the graph's output."""
        deadline = time.monotonic() + timeout_s
        while not (found := holds()):
            assert time.monotonic() < deadline, f"still not so after {timeout_s} s; the graph says:\n{self.text()}"
            time.sleep(0.02)
        return found

    def ready(self) -> Toy:
        self.until(lambda: "is ready" in self.text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()
        return self

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another `graph` command beside it."""
        return subprocess.run(
            [GRAPH, *arguments], env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )

    def status(self, name: str | None = None) -> dict[str, Any]:
        """What `graph status --json` prints, without the time a command takes to start."""
        running = find_running(name, {"XDG_RUNTIME_DIR": str(self.runtime)})

        async def ask() -> StatusReply:
            async with connected(running) as client:
                reply: StatusReply = await client.call(GetStatus(), peer=running.supervisor.id, timeout_s=10)
                return reply

        found: dict[str, Any] = msgspec.to_builtins(asyncio.run(ask()).status)
        return found

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {r["id"]: r for node in self.status()["nodes"].values() for r in node["replicas"]}

    def port(self) -> int:
        """The door's port."""
        return int(self.status()["url"].rpartition(":")[2])

    def ask(self, line: str, port: int | None = None) -> str:
        """One connection through the door."""
        with socket.create_connection(("127.0.0.1", port or self.port()), timeout=10) as connection:
            connection.sendall(line.encode() + b"\n")
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def end(self, number: int = signal.SIGINT, timeout_s: float = 20.0) -> int:
        """Sends a signal and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def processes(self) -> list[psutil.Process]:
        """All processes that write into this test's folder: the supervisor, replicas, whatever they leave."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/fd/1").startswith(str(self.runtime)):
                    found.append(process)
        return found

    def leftovers(self) -> list[str]:
        """Processes and files that should not be there any more."""
        folder = self.runtime / "headrace"
        files = [str(path) for path in folder.rglob("*")] if folder.exists() else []
        return [*map(str, self.processes()), *files]


def _limited(files: tuple[int, int] | None) -> list[str]:
    """A command that runs another one with so many open files, soft and hard."""
    return [] if files is None else ["prlimit", f"--nofile={files[0]}:{files[1]}"]


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A folder for run directories, short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="hr", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def toy(runtime: Path) -> Iterator[Callable[..., Toy]]:
    """Starts a toy graph with further arguments for `graph serve`; ended with the test, whatever happened."""
    started: list[Toy] = []

    def start(*arguments: str, **how: Any) -> Toy:
        started.append(Toy(runtime, *arguments, **how))
        return started[-1]

    yield start
    for each in started:
        for process in each.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        each.process.wait()
