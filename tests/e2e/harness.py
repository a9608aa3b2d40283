"""Starts real graphs as a user does, `graph serve ...` in a process of its own, and looks at them from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
GRAPH = str(Path(sys.executable).parent / "graph")
START_TIMEOUT_S = 90.0


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServedGraph:
    """One `graph serve` process and everything below it."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, log: Path, env: Mapping[str, str], command: Sequence[str]
    ) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.env = {**os.environ, **env}
        self.command = command
        self.client = httpx.Client(base_url=self.url, timeout=120, trust_env=False)
        self.name = ""

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns once `/health` says ready; fails with the log if it does not in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"graph serve exited with {self.process.returncode}:\n{self.log_text()}")
            with contextlib.suppress(httpx.HTTPError):
                if self.client.get("/health").json().get("status") == "ready":
                    self.name = self._announced_name()
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready in {timeout_s} s:\n{self.log_text()}")

    def _announced_name(self) -> str:
        """The running graph's name, from the line that says it is ready."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if found := re.search(r"^(\S+) is ready after", self.log.read_text(errors="replace"), re.MULTILINE):
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"healthy, but not announced:\n{self.log_text()}")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def status(self) -> dict[str, Any]:
        """`graph status --json`, asked as the user who serves."""
        line = [*self.command, "status", "--json", "--graph", self.name]
        done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=True, env=self.env)
        parsed: dict[str, Any] = json.loads(done.stdout)
        return parsed

    def pids(self, node: str) -> list[int]:
        """Process ids of the ready replicas of `node`."""
        return [r["pid"] for r in self.status()["nodes"][node]["replicas"] if r["state"] == "ready"]

    def replicas(self, node: str) -> list[dict[str, Any]]:
        """The replicas of `node` as `graph status` tells them."""
        found: list[dict[str, Any]] = self.status()["nodes"][node]["replicas"]
        return found

    def run(self, *args: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Another `graph` command about this graph."""
        line = [*self.command, args[0], "--graph", self.name, *args[1:]]
        return subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, check=False, env=self.env)

    def wait_until(self, holds: Callable[[], Any], timeout_s: float = 30.0) -> float:
        """Waits until `holds()` is true and returns how long that took; fails with the graph's output."""
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < timeout_s, f"not so within {timeout_s:g} s:\n{self.log_text()}"
            time.sleep(0.1)
        return time.monotonic() - began

    def wait_state(self, state: str = "ready", timeout_s: float = 60.0) -> float:
        """Waits until every desired replica is ready and the graph is in that state."""

        def holds() -> bool:
            status = self.status()
            complete = all(n["ready"] == n["desired"] == len(n["replicas"]) for n in status["nodes"].values())
            return bool(status["state"] == state and complete)

        return self.wait_until(holds, timeout_s)

    def wait_node(self, node: str, timeout_s: float = 60.0) -> float:
        """Waits until every desired replica of `node` is ready."""

        def holds() -> bool:
            counts = self.status()["nodes"][node]
            return bool(counts["ready"] == counts["desired"] == len(counts["replicas"]))

        return self.wait_until(holds, timeout_s)

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """All samples of `/metrics`, by sample name."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def samples(self, name: str, label: str) -> dict[str, float]:
        """The values of `name` by one of its labels."""
        return {labels[label]: value for labels, value in self.metrics().get(name, [])}

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of `name` that carry these labels; the metric must exist."""
        samples = self.metrics()
        assert name in samples, f"{name} is not among {sorted(samples)}"
        return sum(value for found, value in samples[name] if labels.items() <= found.items())

    def family(self) -> list[psutil.Process]:
        """The serving process and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self, timeout_s: float = 40.0) -> int:
        """Ctrl-C once, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not stop in {timeout_s} s:\n{self.log_text()}") from None
        finally:
            self.client.close()

    def end(self) -> None:
        """Whatever the state: no process, no open connection."""
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def start(
    file: str,
    *args: str,
    sets: Mapping[str, object] = {},
    env: Mapping[str, str] = {},
    cwd: Path = ROOT,
    log: Path,
    port: int | None = None,
    command: Sequence[str] = (GRAPH,),
) -> ServedGraph:
    """Starts `graph serve FILE` on a free port; `command` runs `graph` in some other way."""
    port = port or free_port()
    flags = [flag for name, value in sets.items() for flag in ("--set", f"{name}={_yaml(value)}")]
    heed = ["env", "--default-signal=INT"]  # a shell's background job ignores Ctrl-C, and so would what it starts
    line = [*heed, *command, "serve", file, "--port", str(port), *flags, *args]
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            cwd=cwd,
            env={**os.environ, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    return ServedGraph(process, port, log, env, command)


@contextlib.contextmanager
def serving(file: str, *args: str, log: Path, **kwargs: Any) -> Iterator[ServedGraph]:
    """A graph that is ready inside the block and gone, with all its processes, after it."""
    graph = start(file, *args, log=log, **kwargs)
    try:
        graph.wait_ready()
        family = graph.family()
        yield graph
        assert graph.stop() == 0, graph.log_text()
        assert_gone(family)
    finally:
        graph.end()


def assert_gone(processes: Sequence[psutil.Process], timeout_s: float = 5.0) -> None:
    """Fails unless all of `processes` end in time (a zombie that waits for a foreign parent has ended)."""
    deadline = time.monotonic() + timeout_s
    alive = list(processes)
    while alive and time.monotonic() < deadline:
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    assert not alive, f"left behind: {[(p.pid, p.cmdline()) for p in alive]}"


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
