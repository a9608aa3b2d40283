"""The run directory: one private folder per running graph, its unique name and its lock.

    <base>/                   locked for the moment in which names are claimed or looked up
    <base>/<name>/            locked as long as the graph runs; unlocked means that the graph is gone
    <base>/<name>/graph.json  who runs there (`RunningGraph`)
    <base>/<name>/logs/       one log per replica
    <base>/<name>/*.sock      the sockets of the links

Paths are short because a Unix socket's may have 107 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from graph.component import Peer
from graph.errors import LaunchError

MAX_SOCKET_PATH = 107
_LONGEST_SOCKET_NAME = 40  # node name, index, boot id, suffix
_LONGEST_GRAPH_NAME = 24


class RunningGraph(msgspec.Struct, frozen=True):
    """What the CLI must know to find a running graph."""

    name: str
    pid: int
    file: str
    supervisor: Peer
    url: str | None = None


def base_dir(environment: Mapping[str, str]) -> Path:
    """The user's folder of running graphs: below `XDG_RUNTIME_DIR` if that is short enough, else in /tmp."""
    fallback = Path(f"/tmp/headrace-{os.getuid()}")
    runtime = environment.get("XDG_RUNTIME_DIR")
    if not runtime or not os.path.isdir(runtime) or not os.access(runtime, os.W_OK):
        return fallback
    base = Path(runtime) / "headrace"
    longest = len(os.fsencode(base)) + _LONGEST_GRAPH_NAME + _LONGEST_SOCKET_NAME
    return base if longest <= MAX_SOCKET_PATH else fallback


def socket_path(run_dir: Path, replica: str, boot: str) -> Path:
    """Where the replica's one server socket lies; raises `LaunchError` if that is too long for a socket."""
    path = run_dir / f"{replica.replace('/', '-')}-{boot}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise LaunchError(
            f"the socket path {path} is longer than {MAX_SOCKET_PATH} bytes; give the node a shorter name"
        )
    return path


def log_path(run_dir: Path, replica: str) -> Path:
    """The log of a replica, or of the supervisor."""
    return run_dir / "logs" / f"{replica.replace('/', '-')}.log"


class RunDir:
    """A claimed run directory; this process holds its lock until `remove` or its own end."""

    def __init__(self, name: str, path: Path, lock: int) -> None:
        self.name = name
        self.path = path
        self._lock = lock

    @classmethod
    def claim(cls, base: Path, wanted: str) -> RunDir:
        """Takes the first free one of `wanted`, `wanted-2`, ...; removes what killed graphs have left."""
        wanted = wanted[:_LONGEST_GRAPH_NAME]
        with _locked(base):
            _remove_stale(base)
            number = 1
            while (base / (name := wanted if number == 1 else f"{wanted}-{number}")).exists():
                number += 1
            path = base / name
            path.mkdir(mode=0o700)
            (path / "logs").mkdir()
            lock = _try_lock(path)
            assert lock is not None, "a folder just made has a free lock"
            return cls(name, path, lock)

    def announce(self, running: RunningGraph) -> None:
        """Lets the CLI find this graph, or renews what it finds."""
        draft = self.path / "graph.json.new"
        draft.write_bytes(msgspec.json.encode(running))
        draft.rename(self.path / "graph.json")

    def remove(self) -> None:
        """Called last, when all replicas are dead. Idempotent."""
        if self._lock >= 0:
            with _locked(self.path.parent):
                shutil.rmtree(self.path, ignore_errors=True)
                os.close(self._lock)
            self._lock = -1


def running_graphs(base: Path) -> list[RunningGraph]:
    """All graphs that run now, by name; removes what killed ones have left."""
    if not base.is_dir():
        return []
    found = []
    with _locked(base):
        _remove_stale(base)
        for folder in sorted(base.iterdir()):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found.append(msgspec.json.decode((folder / "graph.json").read_bytes(), type=RunningGraph))
    return found


def is_running(base: Path, name: str) -> bool:
    """Whether the graph's supervisor still holds its lock."""
    return any(running.name == name for running in running_graphs(base))


def _remove_stale(base: Path) -> None:
    for folder in (entry for entry in base.iterdir() if entry.is_dir()):
        lock = _try_lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """The folder, open and locked; None when another process holds its lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextlib.contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Holds the lock of the user's folder, which is made before and removed afterwards if empty."""
    descriptor = _lock_existing(base)
    while descriptor is None:
        descriptor = _lock_existing(base)
    try:
        yield
        with contextlib.suppress(OSError):  # not empty
            base.rmdir()
    finally:
        os.close(descriptor)


def _lock_existing(base: Path) -> int | None:
    """The folder, open and locked; None when its last user removed it while we waited for the lock."""
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LaunchError(f"cannot use the folder of running graphs: {error}") from error
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise LaunchError(f"{base} belongs to someone else; remove it, or set XDG_RUNTIME_DIR to a folder of yours")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if base.exists() and os.path.samestat(os.fstat(descriptor), base.stat()):
            os.fchmod(descriptor, 0o700)
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
