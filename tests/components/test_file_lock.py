"""Exclusive locks on files, between processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from components.file_lock import locked
from graph import LaunchError

HOLDER = """
import sys
from pathlib import Path
from components.file_lock import locked
with locked(Path(sys.argv[1]), timeout_s=5.0):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time_holds_it(tmp_path: Path) -> None:
    file = tmp_path / "a.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LaunchError, match=r"a\.lock"), locked(file, timeout_s=0.3):
            pytest.fail("two hold it")
        holder.kill()  # its end releases it, whatever it did
        holder.wait()
        with locked(file, timeout_s=5.0):
            pass


def test_it_is_released_behind_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), locked(tmp_path / "a.lock", timeout_s=1.0):
        raise ValueError("inside")
    with locked(tmp_path / "a.lock", timeout_s=0.0):
        pass
