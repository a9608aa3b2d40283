"""Replicas that live and do not work: stopped processes, blocked loops, work that never returns."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from graph.hangs import PING_INTERVAL_S
from graph.replica_port import LOOP_PATIENCE_S

BOUND_S = PING_INTERVAL_S + LOOP_PATIENCE_S
SLACK_S = 2.0


@pytest.mark.soak
def test_stopped_process_is_killed_within_the_bound(toy: Callable) -> None:
    graph = toy("--set", "greeter.replicas=2").ready()
    before = graph.replicas()["greeter/0"]

    os.kill(before["pid"], signal.SIGSTOP)
    began = time.monotonic()
    graph.until(lambda: graph.replicas()["greeter/0"]["boot"] != before["boot"], timeout_s=30)
    assert time.monotonic() - began < BOUND_S + SLACK_S
    assert not psutil.pid_exists(before["pid"])
    graph.until(lambda: graph.status()["state"] == "ready")
    assert "hung: its event loop did not answer" in graph.replicas()["greeter/0"]["reason"]
    assert 'headrace_replica_hangs_total{node="greeter"} 1.0' in graph.ask("metrics")
    assert graph.end() == 0


def test_work_that_never_returns_is_noticed(toy: Callable) -> None:
    graph = toy("--set", "greeter.fail=stuck", "--set", "greeter.patience_s=0.3").ready()

    graph.until(lambda: graph.replicas()["greeter/0"]["restarts"] >= 1)
    assert "hung: no work got done within 0.3 s" in graph.replicas()["greeter/0"]["reason"]
    assert graph.replicas()["door/0"]["restarts"] == 0
    assert graph.end() == 0
    assert graph.leftovers() == []


def test_stopped_process_does_not_hold_up_a_stop(toy: Callable) -> None:
    graph = toy().ready()
    os.kill(graph.replicas()["greeter/0"]["pid"], signal.SIGSTOP)

    graph.process.send_signal(signal.SIGINT)
    graph.until(lambda: "greeter/0 draining" in graph.text())
    assert graph.end(signal.SIGINT) == 130
    assert graph.leftovers() == []
