"""Exclusive locks on files, between processes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graph import LaunchError


@contextmanager
def locked(path: Path, *, timeout_s: float) -> Iterator[int]:
    """Holds an exclusive lock on the file, made if need be; yields its descriptor, which a child may inherit.

    Raises `LaunchError` if others hold it for so long.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + timeout_s
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise LaunchError(f"another process has held {path} for {timeout_s:.0f} s; end it and try again")
            time.sleep(0.1)
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
