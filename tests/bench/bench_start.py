"""How long shipped graphs take from the command to ready, and the memory of each replica.

    python tests/bench/bench_start.py [--quick]

Needs the model cache to be warm. Goals on two cores: ready within 10 s, ingress under 100 MB, a
processor under 180 MB resident.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]

import psutil
import results
from harness import ServedGraph, serving


def resident_mb(graph: ServedGraph) -> dict[str, float]:
    """Resident memory of each replica, by its id."""
    nodes = graph.status()["nodes"]
    replicas = [replica for node in nodes.values() for replica in node["replicas"]]
    return {r["id"]: round(psutil.Process(r["pid"]).memory_info().rss / 1e6, 1) for r in replicas}


def start_once(file: str) -> tuple[float, float, dict[str, float]]:
    """Seconds until `/health` says ready, CPU seconds spent by then, and the replicas' memory."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with serving(file, log=Path(folder) / "serve.log") as graph:
            ready_s = time.perf_counter() - began
            cpu_s = sum(sum(p.cpu_times()[:2]) for p in graph.family())
            return ready_s, cpu_s, resident_mb(graph)


def main() -> None:
    """Starts each graph several times; the best start counts."""
    figures: dict[str, object] = {}
    for file in ("graph/agg.py", "graph/disagg.py"):
        starts = [start_once(file) for _ in range(1 if "--quick" in sys.argv else 5)]
        ready_s, cpu_s, memory = min(starts, key=lambda start: start[0])
        figures[file] = {"ready_s": round(ready_s, 2), "cpu_s": round(cpu_s, 2), "resident_mb": memory}
        sys.stdout.write(f"{file:<18} ready in {ready_s:5.1f} s   {cpu_s:5.1f} s of CPU   {memory}\n")
    results.write("start", figures)


if __name__ == "__main__":
    main()
