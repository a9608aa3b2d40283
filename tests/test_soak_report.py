"""The table of soak runs: outcomes as JUnit has them, the last file's word, what tests noted."""

from __future__ import annotations

from pathlib import Path

from soak_report import Ran, read, table

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.e2e.test_a" name="test_x[1]" time="2.5">
  <properties><property name="answers" value="32"/><property name="left" value="none"/></properties></testcase>
<testcase classname="tests.e2e.test_a" name="test_y" time="1.0"><failure message="no">assert</failure></testcase>
<testcase classname="tests.e2e.test_a" name="test_z" time="0.0"><skipped/></testcase>
</testsuite></testsuites>"""


def test_outcomes_and_notes(tmp_path: Path) -> None:
    (tmp_path / "run.xml").write_text(JUNIT)
    assert read(tmp_path / "run.xml") == {
        "tests.e2e.test_a::test_x[1]": Ran("passed", 2.5, "answers: 32; left: none"),
        "tests.e2e.test_a::test_y": Ran("FAILED", 1.0, ""),
        "tests.e2e.test_a::test_z": Ran("skipped", 0.0, ""),
    }


def test_the_table_counts_and_tells(tmp_path: Path) -> None:
    (tmp_path / "run.xml").write_text(JUNIT)
    lines = list(table(read(tmp_path / "run.xml")))
    assert "1 FAILED, 1 passed, 1 skipped.\n" in lines
    assert "| tests.e2e.test_a::test_x[1] | passed | 2 | answers: 32; left: none |" in lines
