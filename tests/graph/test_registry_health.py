"""The registry's directory and what it says of a graph's health."""

from __future__ import annotations

import pytest

from graph import (
    Calls,
    Component,
    EdgeView,
    GraphView,
    Message,
    NodeView,
    Publishes,
    Receives,
    Sends,
    Serves,
    Subscribes,
)
from graph.config import resolve
from graph.loader import load_graph
from graph.overrides import read_overrides
from graph.registry import Directory, Entry, LocalRegistry, health


class Ask(Message, frozen=True, array_like=True, tag=True):
    """A request, and an event, and a snapshot."""


class Front(Component):
    """Must reach a worker, may reach a helper."""

    work = Calls(Ask, Ask)
    help = Calls(Ask, Ask, required=False)
    load = Subscribes(Ask, Ask, required=True)
    bulk = Receives("bulk")


class Back(Component):
    """Serves all that."""

    requests = Serves(Ask, Ask)
    load = Publishes(Ask, Ask)
    bulk = Sends("bulk", required=True)


def make_view(*ports: tuple[str, str, str]) -> GraphView:
    """A front with an edge per (front's port, node, its port); sources and targets as the ports demand."""
    nodes = {name: NodeView(name, Back, 1, 0, 1, None, {}, {}) for name in ("worker", "helper")}
    nodes["front"] = NodeView("front", Front, 1, 0, 1, None, {}, {})
    edges = tuple(
        EdgeView("front", mine, node, theirs) if mine in ("work", "help") else EdgeView(node, theirs, "front", mine)
        for mine, node, theirs in ports
    )
    return GraphView("g", "/g.py", nodes, edges)


def ready(*ids: str) -> dict[str, Entry]:
    return {id: Entry(id, "b0", f"ipc:///{id}", "ready") for id in ids}


ALL = make_view(
    ("work", "worker", "requests"),
    ("help", "helper", "requests"),
    ("load", "helper", "load"),
    ("bulk", "helper", "bulk"),
)


@pytest.mark.parametrize(
    ("alive", "state"),
    [
        (("front/0", "worker/0", "helper/0"), "ready"),
        (("front/0", "worker/0", "helper/0", "helper/1"), "ready"),
        (("front/0", "worker/0"), "degraded"),
        (("front/0", "helper/0"), "down"),
        (("worker/0", "helper/0"), "down"),
        ((), "down"),
    ],
)
def test_health(alive: tuple[str, ...], state: str) -> None:
    assert health(ALL, ready(*alive)).state == state


def test_health_names_what_is_missing() -> None:
    found = health(ALL, ready("front/0", "worker/0"))

    assert found.missing[0] == "front.help: no ready replica of 'helper'"
    assert found.nodes == {"front": 1, "worker": 1, "helper": 0}


@pytest.mark.parametrize(
    ("lost", "state"),
    [("frontend", "down"), ("processor", "down"), ("router", "degraded"), ("prefill", "degraded"), ("decode", "down")],
)
def test_health_of_the_disaggregated_graph_without_one_node(lost: str, state: str) -> None:
    graph, module = load_graph("graph/disagg.py")
    view = resolve(graph, module, read_overrides(environ={})).view

    assert health(view, ready(*(f"{node}/0" for node in view.nodes if node != lost))).state == state


@pytest.mark.parametrize("state", ["starting", "draining"])
def test_only_ready_replicas_count(state: str) -> None:
    view = make_view(("work", "worker", "requests"))
    entries = ready("front/0", "worker/0")
    entries["worker/0"] = Entry("worker/0", "b0", "ipc:///w", state)  # type: ignore[arg-type]

    assert health(view, entries).state == "down"


def test_watchers_get_every_directory_until_they_leave() -> None:
    registry = LocalRegistry(ALL)
    seen: list[Directory] = []
    unwatch = registry.watch(seen.append)

    registry.put(Entry("worker/0", "b0", "ipc:///w", "starting"))
    registry.put(Entry("worker/0", "b0", "ipc:///w", "starting"))  # nothing new
    registry.put(Entry("worker/0", "b0", "ipc:///w", "ready"))
    unwatch()
    registry.withdraw("worker/0", "b0")

    assert [directory.version for directory in seen] == [0, 1, 2]
    assert seen[-1].health.nodes["worker"] == 1
    assert registry.directory.replicas == ()


def test_withdrawal_of_an_earlier_boot_is_ignored() -> None:
    registry = LocalRegistry(ALL)
    registry.put(Entry("worker/0", "new", "ipc:///w", "ready"))

    registry.withdraw("worker/0", "old")
    registry.withdraw("worker/9", "old")

    assert [entry.boot for entry in registry.directory.replicas] == ["new"]
