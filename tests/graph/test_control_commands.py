"""The commands against a running toy graph, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable


def test_status_tells_every_replica(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=2").ready()

    status = json.loads(graph.run("status", "--json").stdout)
    assert {"graph", "state", "url", "nodes"} <= status.keys()
    assert (status["graph"], status["state"]) == ("toy", "ready")
    greeter = status["nodes"]["greeter"]
    assert (greeter["desired"], greeter["ready"]) == (2, 2)
    assert [replica["id"] for replica in greeter["replicas"]] == ["greeter/0", "greeter/1"]
    assert all({"id", "pid", "state", "since"} <= replica.keys() for replica in greeter["replicas"])
    table = graph.run("status").stdout
    assert "greeter/1" in table
    assert status["url"] in table
    assert graph.end() == 0


def test_scale_up_to_zero_and_back(toy: Callable) -> None:
    graph = toy().ready()

    assert "starting 2 replicas, draining 0\n" in graph.run("scale", "greeter=+1", "door=2").stdout
    assert sorted(graph.replicas()) == ["door/0", "door/1", "greeter/0", "greeter/1"]
    assert graph.status()["state"] == "ready"

    assert graph.run("scale", "greeter=0").returncode == 0
    assert graph.status()["state"] == "down"
    assert graph.ask("bob") == "nobody is there"
    for command, target in (("restart", "greeter"), ("restart", "greeter/0"), ("drain", "greeter/0")):
        refused = graph.run(command, target)
        assert refused.returncode == 2
        assert f"error: node 'greeter' has no replicas to {command}; graph scale greeter=1 starts one" in refused.stderr

    assert "starting 1 replica, draining 1\n" in graph.run("scale", "greeter=1", "door=-1").stdout
    assert graph.ask("bob").startswith("hello bob")
    assert graph.end() == 0


def test_nonsense_is_refused_before_anything_is_touched(toy: Callable) -> None:
    graph = toy().ready()

    for target, says in (("door=x", "is not NODE=N"), ("dor=1", "no node 'dor'"), ("door=-5", "fewer than 0")):
        refused = graph.run("scale", "greeter=2", target)
        assert refused.returncode == 2
        assert says in refused.stderr
    assert sorted(graph.replicas()) == ["door/0", "greeter/0"]
    assert graph.end() == 0


def test_rolling_restart_gives_every_replica_a_new_process(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=2").ready()
    before = graph.replicas()

    assert graph.run("restart", "greeter").returncode == 0
    after = graph.replicas()
    assert after["door/0"]["pid"] == before["door/0"]["pid"]
    assert all(
        after[id]["pid"] != before[id]["pid"] and after[id]["restarts"] == 0 for id in ("greeter/0", "greeter/1")
    )
    unknown = graph.run("restart", "greeter/7")
    assert unknown.returncode == 2
    assert "no replica 'greeter/7'; the node has greeter/0, greeter/1\n" in unknown.stderr
    assert graph.end() == 0


def test_drained_replica_is_not_replaced(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=2", "--set", "greeter.drain_s=0.3").ready()

    drained = graph.run("drain", "greeter/0")
    assert drained.returncode == 0
    assert "greeter/0 left" in drained.stdout
    assert graph.status()["nodes"]["greeter"]["desired"] == 1
    assert sorted(graph.replicas()) == ["door/0", "greeter/1"]
    assert graph.end() == 0


def test_stop_returns_when_all_is_gone(toy: Callable) -> None:
    graph = toy().ready()

    assert graph.run("stop").returncode == 0
    assert graph.process.wait(1) == 0
    assert graph.leftovers() == []
    none = graph.run("status")
    assert none.returncode == 1
    assert "no graph is running" in none.stderr


def test_detached_graph_outlives_its_command_until_stopped(toy: Callable) -> None:
    graph = toy("--detach")

    assert graph.process.wait(20) == 0
    assert "is ready" in graph.text()
    assert graph.ask("bob").startswith("hello bob")
    assert graph.run("stop").returncode == 0
    assert graph.leftovers() == []


def test_detached_start_reports_a_failure(toy: Callable) -> None:
    graph = toy("--detach", "--set", "greeter.fail=start")

    assert graph.process.wait(20) == 1
    assert "no smile found" in graph.text()
    graph.until(lambda: graph.leftovers() == [], timeout_s=2)


def test_logs_of_one_of_a_node_and_of_all(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=2").ready()

    assert "greeter/1 is ready" in graph.run("logs", "greeter/1").stdout
    assert "greeter/0 | " in graph.run("logs", "greeter").stdout
    assert "door/0 | " in graph.run("logs").stdout
    assert graph.run("logs", "cellar").returncode == 2

    following = subprocess.Popen(
        ["graph", "logs", "-f", "greeter/0"],
        executable=graph.process.args[0],
        env=graph.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.kill(graph.replicas()["greeter/0"]["pid"], signal.SIGKILL)
    assert following.stdout is not None
    while "starts, pid" not in following.stdout.readline():
        pass
    while "starts, pid" not in following.stdout.readline():  # the second process's
        pass
    assert graph.end() == 0
    assert following.wait(5) == 0  # it ends with the graph
    following.stdout.close()


def test_metrics_come_from_all_replicas(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=2").ready()
    graph.ask("bob")

    text = graph.ask("metrics")
    assert 'headrace_greetings_total{node="greeter",replica="greeter/0"}' in text
    assert 'headrace_greetings_total{node="greeter",replica="greeter/1"}' in text
    assert 'headrace_replicas{node="greeter",state="ready"} 2.0' in text
    assert text.count("# TYPE headrace_greetings_total counter") == 1
    assert graph.end() == 0
