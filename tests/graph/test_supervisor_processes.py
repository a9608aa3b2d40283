"""The supervisor with real processes and real signals."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest


def test_ctrl_c_drains_and_leaves_nothing(toy: Callable) -> None:
    graph = toy().ready()
    assert graph.ask("bob").startswith("hello bob from ")

    assert graph.end(signal.SIGINT) == 0
    assert graph.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_sighup_drain_too(toy: Callable, number: int) -> None:
    graph = toy().ready()

    assert graph.end(number) == 0
    assert graph.leftovers() == []


def test_drain_lets_work_finish_and_a_second_signal_does_not(toy: Callable) -> None:
    graph = toy("--set", "greeter.drain_s=20").ready()

    graph.process.send_signal(signal.SIGINT)
    graph.until(lambda: "greeter/0 draining" in graph.text())
    began = time.monotonic()
    assert graph.end(signal.SIGINT) == 130
    assert time.monotonic() - began < 3
    assert graph.leftovers() == []


def test_two_signals_while_starting(toy: Callable) -> None:
    graph = toy("--set", "greeter.start_s=20")
    graph.until(lambda: "smile" in graph.text())

    graph.process.send_signal(signal.SIGINT)
    time.sleep(0.01)  # two at the very same time would be one signal
    graph.process.send_signal(signal.SIGINT)
    assert graph.process.wait(5) in (0, 130)
    assert graph.leftovers() == []


def test_one_signal_while_starting(toy: Callable) -> None:
    graph = toy("--set", "greeter.start_s=20")
    graph.until(lambda: "smile" in graph.text())

    assert graph.end(signal.SIGINT, timeout_s=5) == 0
    assert graph.leftovers() == []


def test_killed_child_is_replaced(toy: Callable) -> None:
    graph = toy().ready()
    before = graph.replicas()["greeter/0"]

    os.kill(before["pid"], signal.SIGKILL)
    graph.until(lambda: graph.replicas()["greeter/0"]["boot"] != before["boot"])
    graph.until(lambda: graph.status()["state"] == "ready")

    after = graph.replicas()["greeter/0"]
    assert after["restarts"] == 1
    assert "killed by SIGKILL" in after["reason"]
    assert graph.ask("eve") == f"hello eve from {after['pid']}"
    assert graph.end() == 0


def test_callers_know_what_a_replica_announced_also_after_its_restart(toy: Callable) -> None:
    graph = toy("--set", "greeter.word=moin").ready()
    before = graph.replicas()["greeter/0"]
    assert graph.ask("facts") == "{'greeter/0': {'letters': 4}}"

    os.kill(before["pid"], signal.SIGKILL)
    graph.until(lambda: graph.replicas()["greeter/0"]["boot"] != before["boot"])
    graph.until(lambda: graph.status()["state"] == "ready")
    assert graph.ask("facts") == "{'greeter/0': {'letters': 4}}"
    assert graph.end() == 0


def test_children_die_with_a_killed_supervisor_and_a_new_start_works(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=2").ready()
    assert len(graph.processes()) == 4

    assert graph.end(signal.SIGKILL) == -signal.SIGKILL
    graph.until(lambda: not graph.processes(), timeout_s=2)

    again = toy().ready()
    assert again.status()["graph"] == "toy"  # the name is free again
    assert again.end() == 0
    assert again.leftovers() == []


def test_children_die_with_a_supervisor_killed_while_they_start(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=4")
    graph.until(lambda: len(graph.processes()) > 2)

    graph.end(signal.SIGKILL)
    graph.until(lambda: not graph.processes(), timeout_s=2)


def test_port_in_use_is_told_before_anything_starts(toy: Callable) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        graph = toy("--set", f"door.port={port}")
        assert graph.process.wait(3) == 1

    assert f"port {port}" in graph.text()
    assert "in use" in graph.text()
    assert "starting" not in graph.text()


def test_two_graphs_side_by_side(toy: Callable) -> None:
    first, second = toy().ready(), toy("--set", "greeter.word=moin").ready()

    assert first.status("toy")["url"] != second.status("toy-2")["url"]
    unclear = first.run("status")
    assert unclear.returncode == 2
    assert "toy, toy-2" in unclear.stderr
    assert first.run("stop", "--graph", "toy").returncode == 0
    assert second.ask("ann").startswith("moin ann")
    assert second.end() == 0
    assert second.leftovers() == []


def test_start_and_stop_again_and_again(toy: Callable) -> None:
    for _ in range(3):
        graph = toy().ready()
        assert graph.end() == 0
        assert graph.leftovers() == []


@pytest.mark.soak
def test_ten_cycles_leave_nothing(toy: Callable) -> None:
    for _ in range(10):
        graph = toy().ready()
        assert graph.end() == 0
        assert graph.leftovers() == []


@pytest.mark.parametrize("fault", ["start", "signal"])
def test_failed_start_is_shown_and_ends_the_graph(toy: Callable, fault: str) -> None:
    graph = toy("--set", f"greeter.fail={fault}")

    assert graph.process.wait(20) == 1
    assert "greeter/0 failed" in graph.text()
    assert ("no smile found" if fault == "start" else "killed by SIGKILL") in graph.text()
    assert graph.leftovers() == []


def test_a_start_fault_is_shown_as_its_one_line(toy: Callable) -> None:
    graph = toy("--set", "greeter.fail=refuse")

    assert graph.process.wait(20) == 1
    told = [line for line in graph.text().splitlines() if line.startswith("greeter/0 failed")]
    assert told == ["greeter/0 failed: no smile to be had; set greeter.fail to nothing"]
    assert "WARNING greeter/0 died: no smile to be had; set greeter.fail to nothing; again in 0.1 s\n" in graph.text()
    assert "Traceback" not in graph.text()
    assert "last lines" not in graph.text()


def test_scaling_into_a_start_fault_is_told_in_one_line(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=0", "--set", "greeter.fail=refuse")
    graph.ready()

    refused = graph.run("scale", "greeter=1")
    assert refused.returncode == 1
    assert refused.stderr == "error: greeter/0 failed: no smile to be had; set greeter.fail to nothing\n"
    assert "greeter/0 failed: no smile to be had" in graph.run("status").stdout
    log = graph.run("logs", "greeter/0").stdout
    assert "no smile to be had" in log
    assert "Traceback" not in log
    assert graph.end() == 0


def test_failed_background_work_ends_its_replica(toy: Callable) -> None:
    graph = toy("--set", "greeter.fail=later").ready()

    graph.until(lambda: graph.replicas()["greeter/0"]["restarts"] >= 1)
    assert "exit status 1 after" in graph.replicas()["greeter/0"]["reason"]
    assert "too tired to smile" in graph.run("logs", "greeter/0").stdout
    assert graph.end() == 0
    assert graph.leftovers() == []


def test_failing_later_becomes_failed_and_restart_mends_it(toy: Callable, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    graph = toy("--set", f"greeter.fail={broken}").ready()
    broken.touch()

    os.kill(graph.replicas()["greeter/0"]["pid"], signal.SIGKILL)
    graph.until(lambda: graph.replicas()["greeter/0"]["state"] == "failed")
    assert "no smile found" in graph.replicas()["greeter/0"]["last_words"]
    assert graph.status()["state"] == "down"
    told = graph.run("status").stdout
    assert "greeter/0 failed" in told
    assert "no smile found" in told

    broken.unlink()
    mended = graph.run("restart", "greeter/0")
    assert mended.returncode == 0, mended.stderr
    assert graph.status()["state"] == "ready"
    assert graph.end() == 0


def test_idle_graph_uses_almost_no_cpu(toy: Callable) -> None:
    graph = toy().ready()
    time.sleep(0.5)

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in graph.processes())

    before = used()
    time.sleep(2)
    assert used() - before <= 0.1  # under 5 % of one core
    assert graph.end() == 0


def test_replicas_are_named_and_have_their_threads(toy: Callable) -> None:
    graph = toy().ready()

    found = {id: psutil.Process(replica["pid"]) for id, replica in graph.replicas().items()}
    assert {process.cmdline()[0] for process in found.values()} == {"headrace: toy door/0", "headrace: toy greeter/0"}
    assert graph.ask("$OMP_NUM_THREADS").startswith(f"hello {len(os.sched_getaffinity(0))} from")
    assert graph.end() == 0


def test_few_open_files_are_raised_as_far_as_allowed_and_told(toy: Callable) -> None:
    graph = toy(limit_files=(256, 1024)).ready()

    assert "a process may open 1024 files only" in graph.text()
    assert all(process.rlimit(psutil.RLIMIT_NOFILE)[0] == 1024 for process in graph.processes())
    assert graph.end() == 0
