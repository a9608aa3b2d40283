"""Ctrl-C at moments when no graph runs yet, or none any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOYS = Path(__file__).with_name("toys.py")

AT_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from graph.__main__ import main

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""

AT_CALLS = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from graph.__main__ import main
from graph.rundir import RunDir

def interrupt(call):
    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return call(*arguments)
    return interrupted
"""


def serve(script: str, runtime: Path) -> subprocess.CompletedProcess[str]:
    """`graph serve` in a process that runs `script` first."""
    return subprocess.run(
        [sys.executable, "-P", "-c", f"{script}\nmain()", "serve", str(TOYS)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("module", ["graph.cli", "click", "graph.loader", "graph.commands", "graph.serving"])
def test_ctrl_c_while_the_command_loads_ends_it_quietly(runtime: Path, module: str) -> None:
    done = serve(AT_IMPORT.format(module=module), runtime)
    # Python itself ends by the signal where the interrupt came out of an `exec`; shells call both 130.
    assert done.returncode in (130, -2)
    assert (done.stdout + done.stderr).strip() in ("", "warning: no GPU here: 'greeter' runs on the CPU")
    assert list(runtime.iterdir()) == []


def test_next_to_nothing_is_loaded_before_ctrl_c_is_taken_care_of() -> None:
    script = "import sys, graph.__main__; print(*{'asyncio', 'click', 'msgspec', 'rich', 'signal'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-P", "-c", script], text=True) == "\n"


def test_ctrl_c_while_the_run_directory_is_claimed_drains(runtime: Path) -> None:
    done = serve(AT_CALLS + "RunDir.claim = interrupt(RunDir.claim)", runtime)
    assert done.returncode == 0
    assert "Traceback" not in done.stdout + done.stderr
    assert list(runtime.iterdir()) == []


def test_ctrl_c_after_the_end_keeps_nothing_from_being_removed(runtime: Path) -> None:
    at_both_ends = "RunDir.claim = interrupt(RunDir.claim); RunDir.remove = interrupt(RunDir.remove)"
    done = serve(AT_CALLS + at_both_ends, runtime)
    assert done.returncode == 0
    assert "Traceback" not in done.stdout + done.stderr
    assert list(runtime.iterdir()) == []
