"""Detached mode: the supervisor in a session of its own, while the caller waits until it is ready."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

MARK = b"\0"
"""Ends the text that the daemon has for its caller; what it writes afterwards is its log."""


def run_detached(serve: Callable[[Callable[[Path], None]], int]) -> int:
    """Runs `serve(on_ready)` in a daemon and returns the caller's exit status.

    Until `on_ready(log)` is called, what the daemon writes appears here; afterwards in the file
    `log`, and the caller returns 0. If the daemon ends before that, its exit status is returned.
    Must be called before any thread is started.
    """
    sys.stdout.flush()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _be_daemon(serve, writer)
    os.close(writer)
    return _follow(pid, reader)


def _be_daemon(serve: Callable[[Callable[[Path], None]], int], writer: int) -> None:
    """The child's side; never returns."""
    os.setsid()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)
    code = 1
    try:
        code = serve(_go_quiet)
    except BaseException:  # nobody is above to show it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _go_quiet(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(1, MARK)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _follow(pid: int, reader: int) -> int:
    """The caller's side: copies what the daemon says until it is ready or gone."""
    try:
        while piece := os.read(reader, 65536):
            text, mark, _ = piece.partition(MARK)
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
            if mark:
                return 0
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
    finally:
        os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or 1
