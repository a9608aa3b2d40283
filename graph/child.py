"""What every process that we start does about its parent: it is told one line, and never outlives it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys

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


def _exit_without_parent(descriptor: int) -> None:
    if not os.read(descriptor, 1):
        os._exit(1)
