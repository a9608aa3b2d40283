"""The supervisor's pure decisions: back-off, drain order, scaling, cores, GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graph import (
    Calls,
    Component,
    DeclarationError,
    EdgeView,
    GraphView,
    LaunchError,
    Listen,
    Message,
    NodeView,
    Serves,
)
from graph.listeners import bind_listeners
from graph.policy import Backoff, drain_order, free_indexes, plan_scale, split_replica, surplus
from graph.resources import GpuPool, cores_for, thread_environment


class Ask(Message, frozen=True, array_like=True, tag=True):
    """A request and its reply."""


class Link(Component):
    """Calls and serves."""

    calls = Calls(Ask, Ask)
    serves = Serves(Ask, Ask)


class Engine(Link):
    """Computes all the time."""

    compute = True


class Only(Link):
    """There is one of it, or none."""

    max_replicas = 1


def make_view(
    *calls: tuple[str, str], engines: tuple[str, ...] = (), gpus: float = 0, cores: float | None = None
) -> GraphView:
    """Nodes named by the calls between them; `engines` compute, with `gpus` and `cores` each."""
    names = dict.fromkeys([node for pair in calls for node in pair] + list(engines))
    nodes = {
        name: NodeView(name, Engine, 1, gpus, 1, cores, {}, {})
        if name in engines
        else NodeView(name, Link, 1, 0, 1, None, {}, {})
        for name in names
    }
    return GraphView("g", "/g.py", nodes, tuple(EdgeView(a, "calls", b, "serves") for a, b in calls))


def test_backoff_is_quick_first_doubles_to_ten_seconds_and_starts_again_after_stable_time() -> None:
    backoff = Backoff()

    delays = [backoff.next_delay_s(1.0) for _ in range(9)]
    assert delays[:3] == [0.1, 0.2, 0.4]
    assert delays[-1] == 10.0
    assert backoff.next_delay_s(30.0) == 0.1


def test_three_failed_starts_in_a_row_are_enough() -> None:
    backoff = Backoff()
    assert backoff.next_delay_s(None) is not None
    assert backoff.next_delay_s(None) is not None
    assert backoff.next_delay_s(0.0) is not None  # it was ready, if only for a moment
    assert [backoff.next_delay_s(None) is None for _ in range(3)] == [False, False, True]


def test_callers_drain_before_those_they_call() -> None:
    view = make_view(("front", "text"), ("text", "router"), ("text", "decode"), ("decode", "prefill"))

    assert drain_order(view) == [["front"], ["text"], ["router", "decode"], ["prefill"]]


def test_nodes_in_a_ring_drain_together() -> None:
    assert drain_order(make_view(("front", "a"), ("a", "b"), ("b", "a"))) == [["front"], ["a", "b"]]


@pytest.mark.parametrize(("target", "count"), [("a=3", 3), ("a=+2", 4), ("a=-2", 0), ("a=0", 0), ("a=2", 2)])
def test_scale_counts(target: str, count: int) -> None:
    assert plan_scale(make_view(("a", "b")), {"a": 2, "b": 1}, [target], 0, 4) == {"a": count}


@pytest.mark.parametrize(
    "target", ["a", "a=", "=1", "a=1.5", "a=--1", "a=x", "c=1", "a=-3", "a=1001", "a=99999999", "a =1"]
)
def test_scale_nonsense(target: str) -> None:
    with pytest.raises(DeclarationError):
        plan_scale(make_view(("a", "b")), {"a": 2, "b": 1}, [target], 0, 4)


def test_scale_names_every_fault_at_once() -> None:
    with pytest.raises(DeclarationError, match=r"no node 'c'.*fewer than 0"):
        plan_scale(make_view(("a", "b")), {"a": 2, "b": 1}, ["c=1", "a=-3"], 0, 4)


def test_scale_beyond_the_gpus_is_refused_unless_there_are_none() -> None:
    view = make_view(engines=("a",), gpus=1)

    assert plan_scale(view, {"a": 1}, ["a=2"], 2, 4) == {"a": 2}
    with pytest.raises(DeclarationError, match=r"3 GPUs \(a 3\), but there are 2"):
        plan_scale(view, {"a": 1}, ["a=3"], 2, 4)
    with pytest.raises(DeclarationError, match=r"2 GPUs \(a 2\), but there is 1$"):
        plan_scale(view, {"a": 1}, ["a=2"], 1, 4)
    assert plan_scale(view, {"a": 1}, ["a=3"], 0, 4) == {"a": 3}


def test_scale_beyond_the_component_or_the_cores_tells_counts_with_their_nouns() -> None:
    view = GraphView("g", "/g.py", {"a": NodeView("a", Only, 1, 0, 1, None, {}, {})}, ())
    with pytest.raises(DeclarationError, match=r"^a=2: a graph can have at most 1 replica of Only$"):
        plan_scale(view, {"a": 1}, ["a=2"], 0, 4)
    with pytest.raises(DeclarationError, match=r"9 replicas that compute, but 1 core can carry at most 8$"):
        plan_scale(make_view(engines=("e",)), {"e": 1}, ["e=9"], 0, 1)


def test_free_indexes_fill_gaps() -> None:
    assert free_indexes([0, 2], 3) == [1, 3, 4]
    assert free_indexes([], 0) == []


def test_replica_names() -> None:
    view = make_view(("a", "b"))
    assert split_replica(view, "a/3") == ("a", 3)
    assert split_replica(view, "a") == ("a", None)
    for wrong in ("c/0", "a/", "a/x", "a/-1"):
        with pytest.raises(DeclarationError):
            split_replica(view, wrong)


@pytest.mark.parametrize(("desired", "num_cores", "share"), [(1, 2, 2), (2, 2, 1), (3, 2, 1), (2, 9, 4), (0, 2, 2)])
def test_engines_share_the_cores(desired: int, num_cores: int, share: int) -> None:
    view = make_view(("front", "engine"), engines=("engine",))
    desired_counts = {"front": 4, "engine": desired}

    assert cores_for(view.nodes["engine"], view, desired_counts, num_cores) == share
    assert cores_for(view.nodes["front"], view, desired_counts, num_cores) == 1


def test_stated_cores_are_taken_and_left_out_of_the_share() -> None:
    stated = make_view(engines=("big",), cores=3)
    both = GraphView("g", "/g.py", {**stated.nodes, **make_view(engines=("small",)).nodes}, ())

    assert cores_for(both.nodes["big"], both, {"big": 1, "small": 1}, 8) == 3
    assert cores_for(both.nodes["small"], both, {"big": 1, "small": 1}, 8) == 5


def test_threads_do_not_spin() -> None:
    environment = thread_environment(3)
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_gpus_are_exclusive_whole_and_shared_in_parts() -> None:
    pool = GpuPool(("0", "1", "2"))

    assert pool.take("a/0", 1) == ("0",)
    assert pool.take("a/0", 1) == ("0",)  # a restart keeps its own
    assert pool.take("b/0", 0.5) == ("1",)
    assert pool.take("b/1", 0.5) == ("1",)
    assert pool.take("b/2", 0.25) == ("2",)
    with pytest.raises(LaunchError, match=r"^1 GPU asked for"):
        pool.take("a/1", 1)
    pool.give_back("a/0")
    pool.give_back("a/0")
    assert pool.take("a/1", 1) == ("0",)


def test_ranks_have_a_gpu_each_and_may_share_them_with_other_replicas() -> None:
    pool = GpuPool(("0", "1"))

    assert pool.take("decode/0", 0.5) == ("0",)
    assert pool.take("prefill/0", 0.5, ranks=2) == ("0", "1")
    with pytest.raises(LaunchError, match="for each of 2 ranks"):
        pool.take("prefill/1", 0.5, ranks=2)
    assert pool.take("decode/1", 0.5) == ("1",)
    pool.give_back("prefill/0")
    with pytest.raises(LaunchError, match=r"^1 GPU for each of 2 ranks"):
        pool.take("whole/0", 1, ranks=2)
    pool.give_back("decode/0")
    pool.give_back("decode/1")
    assert pool.take("whole/0", 1, ranks=2) == ("0", "1")


def test_two_replicas_of_two_ranks_share_two_gpus() -> None:
    pool = GpuPool(("3", "5"))

    assert pool.take("prefill/0", 0.5, ranks=2) == ("3", "5")
    assert pool.take("decode/0", 0.5, ranks=2) == ("3", "5")
    with pytest.raises(LaunchError, match="GPUs for each of 2 ranks"):
        pool.take("decode/1", 0.5, ranks=2)


def test_no_gpu_at_all_leaves_the_choice_to_the_component() -> None:
    assert GpuPool(()).take("a/0", 1) is None
    assert GpuPool(("0",)).take("light/0", 0) == ()


@pytest.mark.parametrize(
    ("states", "leaving"),
    [
        (("ready", "ready", "ready"), [2, 1]),
        (("starting", "ready", "starting"), [2, 0]),  # the one that serves stays, whatever its index
        (("stopped", "ready", "starting"), [0, 2]),
        (("ready", "failed", "ready"), [1, 2]),
        (("failed", "stopped", "starting"), [0, 1]),
    ],
    ids=str,
)
def test_who_serves_leaves_last(states: tuple[str, ...], leaving: list[int]) -> None:
    replicas: list[Any] = [SimpleNamespace(index=i, state=state) for i, state in enumerate(states)]
    assert [m.index for m in surplus(replicas, 1)] == leaving
    assert surplus(replicas, 3) == []
    assert len(surplus(replicas, 0)) == 3


class Listening(Link):
    """Listens where its options say."""

    listens = Listen()


@pytest.mark.parametrize("port", [-1, 65_536, 99_999])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    node = NodeView("front", Listening, 1, 0, 1, None, {"host": "127.0.0.1", "port": port}, {})
    with pytest.raises(LaunchError, match=f"port {port}"):
        bind_listeners(GraphView("g", "/g.py", {"front": node}, ()))
