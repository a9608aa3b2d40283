"""Where benchmarks leave their figures: one JSON file each in `results/`, with the machine and the commit."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def write(name: str, figures: Mapping[str, object]) -> Path:
    """Writes `results/NAME.json` and returns its path; an earlier one is replaced."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**about(), **figures}, indent=2) + "\n")
    return path


def about() -> dict[str, object]:
    """When, where and on which commit; the load average tells whether others used the machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
