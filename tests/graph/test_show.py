"""Pictures of a graph."""

from __future__ import annotations

import json

import pytest
from declared import Customer, Reporter, Shop, Watcher, as_module, make_graph, view_of

from graph import Graph, GraphView, Node
from graph.show import show_json, show_mermaid, show_text, walk_order


def make_view(*sets: str) -> GraphView:
    """A customer, a shop and a reporter with its watcher, declared back to front."""
    shop, customer, watcher, reporter = Node(Shop), Node(Customer), Node(Watcher), Node(Reporter)
    nodes = {"shop": shop, "watcher": watcher, "customer": customer, "reporter": reporter}
    edges = (customer.shop >> shop.into, shop.wares >> customer.basket, reporter.news >> watcher.news)
    return view_of(as_module(Graph("market", *edges, nodes=tuple(nodes.values())), nodes), *sets)


def test_text_tells_nodes_ports_and_kinds_of_edges() -> None:
    assert show_text(make_view("shop.replicas=2", "shop.gpus=1", "shop.tp=2")).splitlines() == [
        "graph market  (/somewhere/market.py)",
        "",
        "  customer  Customer",
        "              shop ──▶ shop.into",
        "  shop      Shop  x2, 1 GPU, tp 2",
        "              wares ══▶ customer.basket",
        "  reporter  Reporter",
        "              news ┄┄▶ watcher.news",
        "  watcher   Watcher",
    ]


def test_config_tells_every_value_and_its_origin() -> None:
    text = show_text(make_view("shop.tuning.mode=slow"), config=True)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "shop.tuning.mode = slow (--set)" in lines
    assert "shop.tuning.limit_ms = 100 (default)" in lines
    assert "shop.replicas = 1 (default)" in lines
    assert "shop.unit = 16 (resolved)" in lines
    assert "shop.names = [] (default)" in lines


def test_mermaid_draws_every_node_and_edge() -> None:
    lines = show_mermaid(make_view("shop.replicas=3")).splitlines()
    assert lines[0] == "flowchart LR"
    assert '    n_shop["<b>shop</b><br/>Shop<br/>x3"]' in lines
    assert "    n_customer -->|shop| n_shop" in lines
    assert "    n_shop ==>|wares| n_customer" in lines
    assert "    n_reporter -.->|news| n_watcher" in lines


def test_json_can_be_read_by_programs() -> None:
    plain = json.loads(show_json(make_view("shop.replicas=2")))
    assert plain["nodes"]["shop"]["replicas"] == 2
    assert plain["nodes"]["shop"]["component"].endswith(":Shop")
    assert "options" not in plain["nodes"]["shop"]
    assert {"source": ["customer", "shop"], "target": ["shop", "into"]} in plain["edges"]


def test_json_with_config_has_values_and_origins() -> None:
    options = json.loads(show_json(make_view("shop.tuning.mode=slow"), config=True))["nodes"]["shop"]["options"]
    assert options["tuning.mode"] == {"value": "slow", "origin": "--set"}


@pytest.mark.parametrize("show", [show_text, show_mermaid, show_json])
def test_an_empty_graph_can_be_shown(show: object) -> None:
    assert show(view_of(as_module(Graph("empty"), {})))  # type: ignore[operator]


def test_callers_come_before_the_called_and_cycles_end() -> None:
    assert walk_order(make_view()) == ["customer", "shop", "reporter", "watcher"]
    assert walk_order(view_of(make_graph())) == ["customer", "shop"]
