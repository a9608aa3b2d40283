"""Graphs served for a benchmark: started with patience, watched from outside, ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import msgspec
import psutil
from harness import ServedGraph, start

from graph.rundir import base_dir

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "graph")
_LOG_BYTES = 2_500


class NotServedError(Exception):
    """A graph did not become ready, or did not end; the message holds what its logs say."""


class Setting(msgspec.Struct, frozen=True):
    """What all parts of a run share."""

    device: str
    model: Path
    vocab_size: int
    max_len: int
    processors: int
    sets: Mapping[str, str]  # of the command line, over all others, for nodes that a graph has
    patience_s: float
    stop_s: float  # steady clock: no further step is begun after it
    save: Callable[[], None]

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.stop_s

    def of(self, *nodes: str, **options: object) -> dict[str, object]:
        """`--set` values for workers: random weights on the device, and `options`."""
        common = {"load_format": "dummy", "device": self.device, "max_model_len": self.max_len, **options}
        found: dict[str, object] = {f"{node}.{name}": value for node in nodes for name, value in common.items()}
        return found


class Served:
    """A graph that is ready."""

    def __init__(self, graph: ServedGraph, ready_s: float) -> None:
        self.port = graph.port
        self.ready_s = ready_s
        self._graph = graph
        self._cpu_s = self._cpu_seconds()
        self._at_s = time.monotonic()

    def cores_used(self) -> dict[str, float]:
        """By process: cores kept busy since the last call."""
        before, began_s = self._cpu_s, self._at_s
        self._cpu_s, self._at_s = self._cpu_seconds(), time.monotonic()
        seconds = self._at_s - began_s
        return {name: round((used - before.get(name, 0.0)) / seconds, 2) for name, used in self._cpu_s.items()}

    def status(self) -> dict[str, Any]:
        """Each replica's start time, GPUs and notice, as `graph status` tells them."""
        kept = ("state", "restarts", "start_s", "gpus", "notice", "reason", "rss_mb")
        nodes = self._graph.status()["nodes"]
        return {r["id"]: {name: r[name] for name in kept} for node in nodes.values() for r in node["replicas"]}

    def metric(self, name: str) -> float:
        """The sum of a metric's samples; 0 where there are none."""
        return sum(value for _, value in self._graph.metrics().get(name, []))

    def _cpu_seconds(self) -> dict[str, float]:
        found = {}
        for process in self._graph.family():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                title = " ".join(process.cmdline()).removeprefix("headrace: ")[:40].strip()
                found[f"{title} ({process.pid})"] = times.user + times.system
        return found


@contextlib.contextmanager
def serving(setting: Setting, file: str, sets: Mapping[str, object]) -> Iterator[Served]:
    """A graph of the setting's model; raises `NotServedError` with the ends of all logs if it does not start."""
    log = Path(f"/tmp/serve-{os.getpid()}.log")
    nodes = {name.partition(".")[0] for name in sets} | {"frontend", "processor", "router"}
    asked = {name: value for name, value in setting.sets.items() if name.partition(".")[0] in nodes}
    sets = {"processor.replicas": setting.processors, **sets, **asked}
    began_s = time.monotonic()
    graph = start(str(ROOT / file), "--model", str(setting.model), sets=sets, log=log, command=COMMAND)
    try:
        try:
            graph.wait_ready(setting.patience_s)
        except AssertionError as error:
            raise NotServedError(f"{error}\n{_replica_logs()}") from error
        yield Served(graph, time.monotonic() - began_s)
        if (code := graph.stop()) != 0:
            raise NotServedError(f"graph serve ended with {code}:\n{graph.log_text()}")
    finally:
        graph.end()


def _replica_logs() -> str:
    """The ends of the logs of whatever graphs there are."""
    logs = sorted(base_dir(os.environ).glob("*/logs/*.log"))
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-_LOG_BYTES:]}" for path in logs)
