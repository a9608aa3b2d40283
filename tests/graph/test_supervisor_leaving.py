"""Replicas that leave: only when nobody sends them anything any more, and within their time."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from graph.policy import MAX_COMPUTE_PER_CORE


def test_no_request_is_lost_while_replicas_come_and_go(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=2").ready()
    over, answers, port = threading.Event(), [], graph.port()

    def ask() -> None:
        while not over.is_set():
            answers.append(graph.ask("bob", port))

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for target in ("greeter=3", "greeter=1", "greeter=2"):
        assert graph.run("scale", target).returncode == 0
    over.set()
    for asker in askers:
        asker.join()
    assert len(answers) > 50
    assert {answer.partition(" from ")[0] for answer in answers} == {"hello bob"}
    assert graph.end() == 0


def test_sigterm_from_elsewhere_withdraws_the_replica_and_it_comes_back(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=2", "--set", "greeter.drain_s=1").ready()
    before = graph.replicas()["greeter/0"]

    os.kill(before["pid"], signal.SIGTERM)
    graph.until(lambda: graph.replicas()["greeter/0"]["state"] == "draining")
    assert {graph.ask("bob").rpartition(" ")[2] for _ in range(6)} == {str(graph.replicas()["greeter/1"]["pid"])}
    graph.until(lambda: graph.replicas()["greeter/0"]["state"] == "ready")
    assert graph.replicas()["greeter/0"]["boot"] != before["boot"]
    assert "exit status 0" in graph.replicas()["greeter/0"]["reason"]
    assert graph.end() == 0


def test_a_command_nobody_waits_for_does_not_confuse_the_next_one(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=3", "--set", "greeter.drain_s=1").ready()

    assert graph.run("scale", "greeter=1", "--no-wait").returncode == 0
    assert graph.run("scale", "greeter=3").returncode == 0
    graph.until(lambda: len(graph.replicas()) == 4)
    status = graph.status()["nodes"]["greeter"]
    assert (status["desired"], status["ready"]) == (3, 3)
    assert graph.end() == 0


def test_commands_at_the_same_time_end_in_the_last_one(toy: Callable) -> None:
    graph = toy().ready()
    flaps = [
        subprocess.Popen([*graph.command, "scale", f"greeter={n}"], env=graph.environment, stdout=subprocess.DEVNULL)
        for n in (3, 1, 3)
    ]
    assert [flap.wait(30) for flap in flaps] == [0, 0, 0]
    assert graph.run("scale", "greeter=2").returncode == 0
    assert sorted(graph.replicas()) == ["door/0", "greeter/0", "greeter/1"]
    assert graph.end() == 0
    assert graph.leftovers() == []


def test_more_than_the_machine_carries_is_refused(toy: Callable) -> None:
    graph = toy().ready()
    most = MAX_COMPUTE_PER_CORE * len(os.sched_getaffinity(0))

    refused = graph.run("scale", f"greeter={most + 1}")
    assert refused.returncode == 2
    assert f"{most + 1} replicas that compute" in refused.stderr
    assert sorted(graph.replicas()) == ["door/0", "greeter/0"]
    assert graph.end() == 0


def test_a_freed_gpu_is_given_to_the_next_one(toy: Callable) -> None:
    graph = toy("--set", "greeter.gpus=1", "--set", "greeter.replicas=2", "--set", "greeter.drain_s=0.5", gpus="4,6")
    graph.ready()
    assert {graph.ask("$CUDA_VISIBLE_DEVICES").split()[1] for _ in range(8)} <= {"4", "6"}

    refused = graph.run("scale", "greeter=3")
    assert refused.returncode == 2
    assert "3 GPUs (greeter 3), but there are 2" in refused.stderr
    assert graph.run("scale", "greeter=1", "--no-wait").returncode == 0
    assert graph.run("scale", "greeter=2").returncode == 0
    assert graph.status()["nodes"]["greeter"]["ready"] == 2
    assert graph.end() == 0


def test_status_tells_why_and_how_long(toy: Callable) -> None:
    graph = toy().ready()
    assert "started in" in graph.run("status").stdout
    os.kill(graph.replicas()["greeter/0"]["pid"], signal.SIGKILL)
    graph.until(lambda: graph.replicas()["greeter/0"]["restarts"] == 1)
    graph.until(lambda: graph.replicas()["greeter/0"]["state"] == "ready")
    assert "before: killed by" in graph.run("status").stdout
    assert graph.replicas()["greeter/0"]["start_s"] > 0
    began = time.monotonic()
    assert graph.end() == 0
    assert time.monotonic() - began < 5
