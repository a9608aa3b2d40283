"""Turns the JUnit files of soak runs into one table, which is committed.

    python tests/soak_report.py OUT.md RUN.xml [RUN.xml ...]

A test that several files hold is told as the last of them has it.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import results

_OUTCOMES = {"failure": "FAILED", "error": "ERROR", "skipped": "skipped"}


class Ran(NamedTuple):
    """One test of a run."""

    outcome: str
    seconds: float
    notes: str


def read(file: Path) -> dict[str, Ran]:
    """The tests of one JUnit file by their names."""
    return {f"{case.get('classname')}::{case.get('name')}": _ran(case) for case in xml.parse(file).iter("testcase")}


def _ran(case: xml.Element) -> Ran:
    outcome = next((_OUTCOMES[part.tag] for part in case if part.tag in _OUTCOMES), "passed")
    notes = "; ".join(f"{p.get('name')}: {p.get('value')}" for p in case.iter("property"))
    return Ran(outcome, float(case.get("time", 0.0)), notes)


def table(ran: dict[str, Ran]) -> Iterable[str]:
    """The report's lines."""
    outcomes = Counter(test.outcome for test in ran.values())
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    yield "# The full matrices\n"
    yield "`make soak` on {cores} cores ({cpu}), {date}, commit {commit}:".format(**results.about())
    yield f"{counts}.\n"
    yield "| test | outcome | s | |"
    yield "|---|---|---|---|"
    for name, test in sorted(ran.items()):
        yield f"| {name} | {test.outcome} | {test.seconds:.0f} | {test.notes} |"


def main() -> int:
    """Writes the report; exit status 1 if a test failed."""
    out, *files = map(Path, sys.argv[1:])
    ran = {name: test for file in files for name, test in read(file).items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(table(ran)) + "\n")
    return int(any(test.outcome in ("FAILED", "ERROR") for test in ran.values()))


if __name__ == "__main__":
    sys.exit(main())
