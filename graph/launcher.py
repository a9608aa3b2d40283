"""The local launcher: starts each replica as a process of its own on this machine, and buries it.

A process leads its own session, so that Ctrl-C in a terminal reaches the supervisor alone, and its
own process group, so that nothing it started outlives it. It is dead only when it has been reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from graph.errors import LaunchError
from graph.spec import ReplicaSpec


class Exit(msgspec.Struct, frozen=True):
    """How a process ended."""

    code: int  # negative: the signal's number

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit status {self.code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-self.code).name}"
        return f"killed by signal {-self.code}"


class LocalProcess:
    """One started replica."""

    def __init__(self, popen: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._loop = loop
        self._exit: asyncio.Future[Exit] = loop.create_future()
        self._pidfd = os.pidfd_open(popen.pid)
        loop.add_reader(self._pidfd, self._bury)

    async def wait(self) -> Exit:
        """Returns once the process is reaped; any number of callers may wait."""
        return await asyncio.shield(self._exit)

    def terminate(self) -> None:
        """Asks it to drain and leave. Nothing happens if it is gone already."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once; `wait` tells when it is dead. Nothing happens if it is gone already."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._exit.done():
            self._popen.send_signal(number)

    def _bury(self) -> None:
        # Not reaped yet, so the number of its group cannot be another's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._popen.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._popen.stdin is not None:
            self._popen.stdin.close()
        self._exit.set_result(Exit(code))


class LocalLauncher:
    """Starts replicas as child processes."""

    def start(
        self, spec: ReplicaSpec, *, environment: Mapping[str, str], log: Path, listener: socket.socket | None
    ) -> LocalProcess:
        """Starts the process and tells it `spec`. Its output goes to the end of `log`.

        Must be called on the main thread: the kernel ends the child with the thread that made it.
        Raises `LaunchError` when the system refuses.
        """
        inherited = () if listener is None else (listener.fileno(),)
        spec = msgspec.structs.replace(spec, listener=inherited[0] if inherited else None)
        try:
            with log.open("ab") as output:
                popen = subprocess.Popen(
                    [sys.executable, "-P", "-m", "graph.replica"],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=dict(environment),
                    pass_fds=inherited,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"cannot start {spec.id}: {error}") from error
        _tell(popen, spec)
        return LocalProcess(popen, asyncio.get_running_loop())


def _tell(popen: subprocess.Popen[bytes], spec: ReplicaSpec) -> None:
    assert popen.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # dead already, as its exit will tell
        popen.stdin.write(msgspec.json.encode(spec) + b"\n")
        popen.stdin.flush()


def log_tail(log: Path, num_lines: int = 12) -> str:
    """The last lines of a log, as an error message shows them."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-num_lines:])


def bound_log(log: Path, max_bytes: int) -> None:
    """Keeps a log that a process appends to below twice `max_bytes`: what is older moves to `<log>.1`."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > max_bytes:
            older = log.with_name(log.name + ".1")
            older.write_bytes(log.read_bytes())
            os.truncate(log, 0)  # its writers append, so they go on at the start
