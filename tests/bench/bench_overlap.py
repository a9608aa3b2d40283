"""What is left to wait for once prefill has ended, with READs hidden behind the computation and without.

    python tests/bench/bench_overlap.py [--tokens 2000] [--rounds 7] [--args "--set decode.device=cuda ..."]

Serves graph/disagg.py with an idle decode worker and sends one prompt of several chunks at a time. All times are
of one host's steady clock, from the request's own timeline: the last "chunk" is when prefill had ended, "adopted"
when decode's engine was let go on, which is the beginning of its first step. Overlap must leave at most the last
chunk's READ and 5 ms before that.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from completions import complete
from harness import serving
from prompts import Prompt, text_ids

SLACK_MS = 5.0


def tail(timing: dict[str, Any]) -> dict[str, float]:
    """One request's times after the end of prefill, in ms."""
    at: dict[str, list[float]] = {}
    for event, ms in timing["timeline"]:
        at.setdefault(event, []).append(ms)
    end = at["chunk"][-1]
    last_read_ms = at["read_done"][-1] - at["read"][-1]
    return {
        "chunks": len(at["chunk"]),
        "reads": len(at["read"]),
        "until_kv_ms": at["read_done"][-1] - end,
        "until_adopted_ms": at["adopted"][-1] - end,
        "last_read_ms": last_read_ms,
        "all_reads_ms": sum(stop - start for start, stop in zip(at["read"], at["read_done"], strict=True)),
    }


def measure(is_off: bool, arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Medians over the rounds."""
    sets: dict[str, object] = {"decode.disable_kv_cache_transfer_overlap": is_off}
    extra = shlex.split(arguments.args)
    with serving("graph/disagg.py", *extra, log=folder / f"{is_off}.log", sets=sets) as graph:
        prompt = Prompt("long", tuple((text_ids() * 4)[: arguments.tokens]), 4)
        rounds = []
        for turn in range(arguments.rounds + 1):
            answer = complete(graph.url, [prompt], cache_salt=f"turn-{turn}")["long"]
            assert answer.headrace is not None
            assert answer.headrace["mode"] == "remote"
            if turn:  # the first one warms up
                rounds.append(tail(answer.headrace))
    return {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}


def main() -> int:
    """Measures both and judges overlap; one JSON object on stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--args", default="", help="further arguments of graph serve")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report: dict[str, Any] = {
            "overlap": measure(False, arguments, Path(folder)),
            "without": measure(True, arguments, Path(folder)),
        }
    left = report["overlap"]
    report["is_hidden"] = left["until_adopted_ms"] <= left["last_read_ms"] + SLACK_MS
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0 if report["is_hidden"] else 1


if __name__ == "__main__":
    sys.exit(main())
