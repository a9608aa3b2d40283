"""`graph serve` as a user runs it: start, stop, kill, other folders, other users, two at once."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import GRAPH, ROOT, ServedGraph, assert_gone, free_port, serving

from components.model_cache import resolve_model
from components.options import DEFAULT_MODEL

Start = Callable[..., ServedGraph]
FAKE = {"prefill.engine": "fake", "decode.engine": "fake"}
CHAT = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "Name the capital of Japan."}],
    "temperature": 0,
    "max_tokens": 16,
}


def leftovers() -> set[str]:
    """Shared memory and run folders that graphs could leave behind."""
    folders = [Path("/dev/shm"), Path(os.environ["XDG_RUNTIME_DIR"]) / "headrace"]
    return {str(entry) for folder in folders if folder.is_dir() for entry in folder.iterdir()}


def test_chat_over_the_default_graph(log: Path) -> None:
    with serving("graph/disagg.py", log=log) as graph:
        reply = graph.client.post("/v1/chat/completions", json=CHAT).raise_for_status().json()
        assert reply["choices"][0]["message"]["content"] == "The capital of Japan is Tokyo."
        sizes = {p.cmdline()[0]: p.memory_info().rss / 1e6 for p in graph.family() if p.cmdline()}
        ingress = next(size for title, size in sizes.items() if "frontend/0" in title)
        processor = next(size for title, size in sizes.items() if "processor/0" in title)
        assert ingress < 100
        assert processor < 180


def test_sigkill_of_the_parent_leaves_nothing(started: Start, log: Path) -> None:
    before = leftovers()
    graph = started("graph/disagg.py", log=log, sets=FAKE)
    graph.wait_ready()
    family = graph.family()
    graph.process.kill()
    graph.process.wait()
    assert_gone(family)
    with serving("graph/disagg.py", log=log, sets=FAKE, port=graph.port):
        pass
    assert leftovers() <= before


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_cleanly(started: Start, how: signal.Signals, log: Path) -> None:
    before = leftovers()
    graph = started("graph/disagg.py", log=log, sets=FAKE)
    graph.wait_ready()
    family = graph.family()
    graph.process.send_signal(how)
    assert graph.process.wait(30) == 0
    assert_gone(family)
    assert leftovers() <= before


@pytest.mark.parametrize("delay_s", [0.05, 0.4, 0.8, 1.5])
def test_double_ctrl_c_while_starting(started: Start, delay_s: float, log: Path) -> None:
    before = leftovers()
    graph = started("graph/disagg.py", log=log)
    time.sleep(delay_s)
    family = graph.family()
    graph.process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    if graph.process.poll() is None:
        graph.process.send_signal(signal.SIGINT)
    graph.process.wait(15)
    assert_gone(family)
    assert leftovers() <= before


def test_port_in_use_is_told_before_anything_loads(started: Start, log: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        began = time.monotonic()
        graph = started("graph/disagg.py", log=log, port=port)
        assert graph.process.wait(10) != 0
        assert time.monotonic() - began < 3
        assert str(port) in graph.log_text()


@pytest.mark.timeout(240)
def test_two_graphs_side_by_side(tmp_path: Path) -> None:
    with (
        serving("graph/disagg.py", log=tmp_path / "one.log", sets=FAKE) as one,
        serving("graph/disagg.py", log=tmp_path / "two.log", sets=FAKE) as two,
    ):
        assert one.name != two.name
        for graph in (one, two):
            assert graph.client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert one.status()["url"] != two.status()["url"]


def test_detached_graph_is_found_and_stopped(tmp_path: Path) -> None:
    port = free_port()
    flags = [flag for name, value in FAKE.items() for flag in ("--set", f"{name}={value}")]
    began = subprocess.run(
        [GRAPH, "serve", "graph/disagg.py", "--port", str(port), "--detach", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert f":{port}" in began.stdout
    stopped = subprocess.run([GRAPH, "stop"], capture_output=True, text=True, timeout=60, check=False)
    assert stopped.returncode == 0, stopped.stderr


def test_serves_from_another_folder_and_offline(tmp_path: Path) -> None:
    proxy = "http://127.0.0.1:9"
    offline = {"HF_HUB_OFFLINE": "1", "HTTP_PROXY": proxy, "ALL_PROXY": ":", "http_proxy": proxy}
    with serving("graph/disagg.py", log=tmp_path / "serve.log", cwd=tmp_path, env=offline, sets=FAKE) as graph:
        assert graph.client.post("/v1/chat/completions", json=CHAT).status_code == 200


def ordinary_python() -> list[str]:
    """A command that runs `graph` as user nobody: with our interpreter, or with the system's where ours lies hidden."""
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    same = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (sys.executable, f"/usr/bin/{same}"):
        command = [
            *user,
            "env",
            python,
            "-c",
            "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); import graph.cli",
        ]
        search = ":".join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
        if subprocess.run([*command, search], capture_output=True, check=False).returncode == 0:
            return [*user, "env", f"PYTHONPATH={search}", python, "-m", "graph"]
    pytest.skip("no interpreter here that an ordinary user can reach")


@pytest.mark.timeout(240)
@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which only root can; else all tests show it")
def test_serves_as_an_ordinary_user(tmp_path: Path) -> None:
    command = ordinary_python()
    home = Path(tempfile.mkdtemp(prefix="hr-home-", dir="/tmp"))
    home.chmod(0o777)
    try:
        shutil.copytree(resolve_model(DEFAULT_MODEL), home / "model")
        env = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
        sets = FAKE | {f"{node}.model": home / "model" for node in ("processor", "prefill", "decode")}
        log = tmp_path / "serve.log"
        with serving("graph/disagg.py", log=log, command=command, env=env, cwd=home, sets=sets) as graph:
            chat = CHAT | {"model": graph.client.get("/v1/models").json()["data"][0]["id"]}
            assert {process.uids().real for process in graph.family()} == {65534}
            assert graph.client.post("/v1/chat/completions", json=chat).status_code == 200
    finally:
        shutil.rmtree(home)


def test_help_is_quick() -> None:
    times = []
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([GRAPH, "--help"], capture_output=True, check=True)
        times.append(time.monotonic() - began)
    assert min(times) < 0.3
