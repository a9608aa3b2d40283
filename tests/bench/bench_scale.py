"""Scaling and recovery of the disagg graph on this machine, in seconds.

    python tests/bench/bench_scale.py [--fake]

Rows: from `graph scale decode=+1` to the new worker's first token; how long a decode worker with 32 streams takes
to leave; the longest pause of any of 64 streams when one of two replicas is killed, by component. `--fake` serves
without a model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "e2e")]

from harness import ServedGraph, serving
from streams import bodies, faults, keep_busy, run_streams

NODES = ("processor", "router", "prefill", "decode")
MODEL = {"prefill.dtype": "float32", "decode.dtype": "float32"}
NUM_CANARIES = 5  # tokens of a worker that nobody has asked for anything, at most
FAKE = {"prefill.engine": "fake", "decode.engine": "fake", "decode.fake.step_ms": 20}


def row(name: str, text: str) -> None:
    sys.stdout.write(f"{name:<52} {text}\n")
    sys.stdout.flush()


def scale_up(graph: ServedGraph, requests: list[dict[str, Any]]) -> None:
    """Under a load of 8 streams."""
    served_at: list[float] = []

    def watch() -> None:
        while not served_at:
            if (
                graph.samples("headrace_engine_generated_tokens_total", "replica").get("decode/1", 0) > 5
            ):  # more than its canaries
                served_at.append(time.monotonic())
            time.sleep(0.05)

    async def main() -> float:
        over = asyncio.Event()
        expected = await run_streams(graph.url, requests)
        load = asyncio.create_task(keep_busy(graph.url, requests, expected, over, at_once=8))
        await asyncio.sleep(1.0)
        began = time.monotonic()
        watcher = threading.Thread(target=watch)
        watcher.start()
        done = await asyncio.to_thread(graph.run, "scale", "decode=+1")
        row("graph scale decode=+1, as it tells", done.stdout.strip().replace("\n", "; "))
        await asyncio.to_thread(watcher.join)
        over.set()
        row("requests that failed meanwhile", str(len((await load).faults)))
        return served_at[0] - began

    row("graph scale decode=+1 until its first token", f"{asyncio.run(main()):6.2f} s")


def drain(graph: ServedGraph, requests: list[dict[str, Any]]) -> None:
    """Two workers with 32 streams each; one leaves."""
    expected = asyncio.run(run_streams(graph.url, requests))

    async def leave() -> None:
        await asyncio.sleep(1.0)
        done = await asyncio.to_thread(graph.run, "scale", "decode=1")
        row("graph scale decode=1, 32 streams on the one that leaves", done.stdout.strip().replace("\n", "; "))

    row("streams that failed", str(len(faults(asyncio.run(run_streams(graph.url, requests, leave)), expected))))


def kills(graph: ServedGraph, requests: list[dict[str, Any]]) -> None:
    expected = asyncio.run(run_streams(graph.url, requests))
    row("longest pause undisturbed", f"{max(o.longest_pause_s for o in expected):6.2f} s")
    for node in NODES:
        pid = graph.pids(node)[0]

        async def kill(pid: int = pid) -> None:
            await asyncio.sleep(1.5)
            os.kill(pid, signal.SIGKILL)

        outcomes = asyncio.run(run_streams(graph.url, requests, kill))
        pause_s = max(outcome.longest_pause_s for outcome in outcomes)
        row(f"{node} killed", f"{pause_s:6.2f} s longest pause, {len(faults(outcomes, expected))} failed or different")
        graph.wait_state()


def main() -> None:
    sets, tokens = (FAKE, 100) if "--fake" in sys.argv else (MODEL, 32)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        with serving("graph/disagg.py", log=log, sets=sets) as graph:
            scale_up(graph, bodies(16, max_tokens=tokens))
            drain(graph, bodies(64, max_tokens=2 * tokens))
        two = {f"{node}.replicas": 2 for node in NODES if node != "router"}
        with serving("graph/disagg.py", log=log, sets={**sets, **two}) as graph:
            kills(graph, bodies(64, max_tokens=tokens))


if __name__ == "__main__":
    main()
