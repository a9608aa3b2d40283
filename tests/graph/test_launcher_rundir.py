"""Run directories, listening sockets, and processes of the local launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from graph import Component, GraphView, LaunchError, Listen, NodeView, Peer
from graph.launcher import Exit, LocalLauncher, bound_log, log_tail
from graph.listeners import bind_listeners, url_of
from graph.rundir import RunDir, RunningGraph, base_dir, running_graphs, socket_path
from graph.spec import ReplicaSpec


class Door(Component):
    """Listens."""

    listens = Listen()


def make_view(*ports: int, host: str = "127.0.0.1") -> GraphView:
    """Doors at those ports."""
    nodes = {
        f"door{i}": NodeView(f"door{i}", Door, 1, 0, 1, None, {"host": host, "port": port}, {})
        for i, port in enumerate(ports)
    }
    return GraphView("g", "/g.py", nodes, ())


def make_spec(tmp_path: Path, *, component: str = "nowhere:Nothing", parent_pid: int | None = None) -> ReplicaSpec:
    return ReplicaSpec(
        id="a/0",
        boot="b",
        graph="g",
        component=component,
        options={},
        run_dir=str(tmp_path),
        address=f"ipc://{tmp_path}/a",
        supervisor=Peer("supervisor/0", "s", f"ipc://{tmp_path}/s"),
        targets={},
        num_cores=1,
        parent_pid=os.getpid() if parent_pid is None else parent_pid,
    )


def running(name: str) -> RunningGraph:
    return RunningGraph(name, os.getpid(), "/g.py", Peer("supervisor/0", "b", "ipc:///s"))


def test_names_are_unique_and_free_again(runtime: Path) -> None:
    base = runtime / "headrace"
    first, second = RunDir.claim(base, "agg"), RunDir.claim(base, "agg")
    first.announce(running(first.name))
    second.announce(running(second.name))

    assert [each.name for each in running_graphs(base)] == ["agg", "agg-2"]
    assert (first.path.stat().st_mode & 0o777, base.stat().st_mode & 0o777) == (0o700, 0o700)
    first.remove()
    first.remove()
    assert [each.name for each in running_graphs(base)] == ["agg-2"]
    second.remove()
    assert not base.exists()


def test_what_a_killed_graph_left_is_removed(runtime: Path) -> None:
    stale = runtime / "headrace" / "agg"
    stale.mkdir(parents=True)
    (stale / "decode-0-1234.sock").touch()

    assert running_graphs(runtime / "headrace") == []
    assert not stale.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a folder of someone else")
def test_a_folder_of_someone_else_is_refused(runtime: Path) -> None:
    base = runtime / "headrace"
    base.mkdir()
    os.chown(base, 12345, 12345)

    with pytest.raises(LaunchError, match="someone else"):
        RunDir.claim(base, "agg")


def test_base_is_short_enough_for_sockets(tmp_path: Path, runtime: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    fallback = Path(f"/tmp/headrace-{os.getuid()}")

    assert base_dir({"XDG_RUNTIME_DIR": str(runtime)}) == runtime / "headrace"
    assert base_dir({"XDG_RUNTIME_DIR": str(long)}) == fallback
    assert base_dir({"XDG_RUNTIME_DIR": "/does/not/exist"}) == fallback
    assert base_dir({}) == fallback
    with pytest.raises(LaunchError, match="shorter name"):
        socket_path(fallback / "g", "n" * 100 + "/0", "b")


def test_listeners_take_a_free_port_and_tell_the_url() -> None:
    listeners = bind_listeners(make_view(0, 0))

    port = listeners["door0"].getsockname()[1]
    assert url_of(listeners) == f"http://127.0.0.1:{port}"
    with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is in use.*door1.port"):
        bind_listeners(make_view(0, port))
    for listener in listeners.values():
        listener.close()


@pytest.mark.parametrize("host", ["256.0.0.1", "no such host", "192.0.2.1"])
def test_wrong_address_is_told(host: str) -> None:
    with pytest.raises(LaunchError, match=host):
        bind_listeners(make_view(0, host=host))


def test_no_listener_no_url() -> None:
    assert url_of(bind_listeners(make_view())) is None


async def test_process_that_cannot_import_its_component_tells_so(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    process = LocalLauncher().start(make_spec(tmp_path), environment=os.environ, log=log, listener=None)

    assert await process.wait() == Exit(1)
    assert await process.wait() == Exit(1)  # any number of times
    process.terminate()  # and late signals hit nobody
    assert "No module named 'nowhere'" in log_tail(log)
    assert not psutil.pid_exists(process.pid)


async def test_process_whose_parent_died_early_leaves(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    process = LocalLauncher().start(make_spec(tmp_path, parent_pid=1), environment=os.environ, log=log, listener=None)

    assert await process.wait() == Exit(1)
    assert log_tail(log) == ""


async def test_killed_process_tells_the_signal(tmp_path: Path) -> None:
    process = LocalLauncher().start(make_spec(tmp_path), environment=os.environ, log=tmp_path / "a", listener=None)
    process.kill()

    assert str(await process.wait()) == "killed by SIGKILL"


async def test_system_that_refuses_a_process_is_a_launch_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    with pytest.raises(LaunchError, match="cannot start a/0"):
        LocalLauncher().start(make_spec(tmp_path), environment={}, log=tmp_path / "a", listener=None)


def test_logs_are_bounded_and_their_writers_go_on(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"old\n" * 10)
        bound_log(log, 40)
        assert log.stat().st_size == 40  # exactly full
        writer.write(b"x")
        bound_log(log, 40)
        writer.write(b"new\n")

    assert log.read_bytes() == b"new\n"
    assert (tmp_path / "a.log.1").read_bytes().startswith(b"old\n")
    assert log_tail(log) == "new"
    assert log_tail(tmp_path / "none.log") == ""
