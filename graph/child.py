"""What every process that we start does: it is told one line, never outlives its parent, and says why it failed."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys

from graph.errors import GraphError

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Lets the kernel kill this process when the thread that started it ends; called first of all."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def read_line(descriptor: int = 0) -> bytes:
    """The one line that the parent sends; afterwards the pipe only tells whether it lives."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(descriptor, 65536)
        if not piece:
            sys.exit("the parent is gone")
        line += piece
    return bytes(line)


def end_with_pipe(loop: asyncio.AbstractEventLoop, descriptor: int = 0) -> None:
    """Ends this process when the parent closes the pipe, or is dead."""
    loop.add_reader(descriptor, _exit_without_parent, descriptor)


def set_title(title: str) -> None:
    """What `ps` shows."""
    import setproctitle

    setproctitle.setproctitle(title)


def log_failure(log: logging.Logger, what: str, error: BaseException) -> None:
    """Logs that `what` failed: in one line where the error was raised on purpose and says what to do, else with its
    traceback. Where the former was raised is told at debug level."""
    if isinstance(error, GraphError):
        log.error("%s failed: %s", what, error)
        log.debug("%s failed here", what, exc_info=error)
    else:
        log.error("%s failed", what, exc_info=error)


def _exit_without_parent(descriptor: int) -> None:
    if not os.read(descriptor, 1):
        os._exit(1)
