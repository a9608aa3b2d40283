"""The check: every fault at once, each saying what, which and what to do."""

from __future__ import annotations

import pytest
from declared import (
    NO_GPU,
    TWO_GPUS,
    Broken,
    Curious,
    Customer,
    Hasty,
    Reporter,
    Shop,
    Watcher,
    as_module,
    make_graph,
    settle,
    view_of,
)

from graph import Edge, Graph, Node
from graph.check import Report, check
from graph.loader import load_graph
from graph.resources import Machine


def make_report(*edges: Edge, machine: Machine = NO_GPU, sets: tuple[str, ...] = (), **nodes: Node) -> Report:
    """The report on a graph of these nodes and edges."""
    return check(view_of(as_module(Graph("market", *edges, nodes=tuple(nodes.values())), nodes), *sets), machine)


def market(machine: Machine = NO_GPU, *sets: str, **nodes: Node) -> Report:
    """The report on a customer linked to a shop, with changes."""
    return check(view_of(make_graph(**nodes), *sets), machine)


def shipped(name: str, *sets: str, machine: Machine = NO_GPU) -> Report:
    resolved = settle(load_graph(f"graph/{name}.py"), *sets)
    return check(resolved.view, machine, resolved.faults)


@pytest.mark.parametrize("name", ["agg", "disagg"])
def test_the_shipped_graphs_have_no_faults(name: str) -> None:
    assert shipped(name).faults == ()
    assert shipped(name, machine=TWO_GPUS) == Report()


def test_a_required_port_without_an_edge_names_who_could_be_linked() -> None:
    customer, shop = Node(Customer), Node(Shop)
    assert make_report(customer=customer, shop=shop).faults == (
        "node 'customer' has no edge to a shop; link customer.shop in market.py: customer.shop >> shop.into",
        "node 'shop' has no edge from a customer; link shop.into in market.py: customer.shop >> shop.into",
    )


def test_a_required_port_that_nothing_fits() -> None:
    [fault] = make_report(customer=Node(Customer)).faults
    assert fault == (
        "node 'customer' has no edge to any peer for 'shop'; link customer.shop in market.py, and add the node it needs"
    )


def test_a_required_subscription_without_a_publisher() -> None:
    watcher, reporter = Node(Watcher), Node(Reporter)
    [fault] = make_report(watcher=watcher, reporter=reporter).faults
    assert "node 'watcher' has no edge from a reporter" in fault
    assert make_report(reporter.news >> watcher.news, watcher=watcher, reporter=reporter).faults == ()


def test_edges_between_ports_that_do_not_fit() -> None:
    customer, shop, hasty, curious = Node(Customer), Node(Shop), Node(Hasty), Node(Curious)
    watcher, reporter = Node(Watcher), Node(Reporter)
    faults = make_report(
        customer.shop >> shop.into,
        hasty.shop >> shop.into,
        curious.shop >> shop.into,
        reporter.gossip >> watcher.news,
        reporter.news >> shop.into,
        shop.into >> customer.shop,
        customer=customer, shop=shop, hasty=hasty, curious=curious, watcher=watcher, reporter=reporter,
    ).faults  # fmt: skip
    nothing = "no other port in this graph takes it; remove the edge"
    assert faults[:5] == (
        f"edge hasty.shop >> shop.into cannot work: the server does not take Other; {nothing}",
        f"edge curious.shop >> shop.into cannot work: the caller does not expect the reply Answer; {nothing}",
        f"edge reporter.gossip >> watcher.news cannot work: the subscriber does not take Other, Other; {nothing}",
        "edge reporter.news >> shop.into cannot work: a Publishes port cannot be linked to a Serves port; "
        "link reporter.news to watcher.news",
        "edge shop.into >> customer.shop cannot work: a Serves port cannot be linked to a Calls port; "
        "turn it around: customer.shop >> shop.into",
    )


def test_bulk_ports_are_linked_by_kind() -> None:
    customer, shop = Node(Customer), Node(Shop)
    good = make_report(
        customer.shop >> shop.into, shop.wares >> customer.basket, customer=customer, shop=shop
    )  # fmt: skip
    assert good.faults == ()
    wrong = make_report(customer.shop >> shop.into, customer.shop >> customer.basket, customer=customer, shop=shop)
    assert any("cannot be linked to a Receives port" in fault for fault in wrong.faults)


def test_a_self_edge_and_a_doubled_edge() -> None:
    customer, shop = Node(Customer), Node(Shop)
    once = customer.shop >> shop.into
    faults = make_report(once, once, shop.wares >> shop.into, customer=customer, shop=shop).faults
    assert "edge customer.shop >> shop.into is listed 2 times; keep one" in faults
    assert "edge shop.wares >> shop.into links node 'shop' to itself; link it to another node" in faults


def test_options_that_must_agree_are_compared_across_each_edge_once() -> None:
    assert market(NO_GPU, "shop.flavour=sour").faults == (
        "nodes 'customer' and 'shop' are linked but differ in flavour: 'plain' and 'sour'; "
        "set customer.flavour and shop.flavour to the same value",
    )


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("shop.replicas=-1", "node 'shop' has replicas -1; set shop.replicas to 0 or more"),
        ("shop.tp=0", "node 'shop' has tp 0; set shop.tp to 1 or more"),
        ("shop.gpus=-0.5", "node 'shop' has gpus -0.5; set shop.gpus to 0 or more"),
        ("shop.cores=0", "node 'shop' has cores 0; set it above 0, or leave it out to share"),
    ],
)
def test_counts_below_what_they_can_be(flag: str, words: str) -> None:
    assert market(NO_GPU, flag).faults == (words,)


def test_zero_replicas_are_allowed() -> None:
    assert market(NO_GPU, "shop.replicas=0").faults == ()


@pytest.mark.parametrize(
    ("sets", "total"),
    [(("shop.gpus=2",), None), (("shop.replicas=4", "shop.gpus=0.5"), None), (("shop.gpus=1", "shop.tp=3"), "3 GPUs"),
     (("shop.replicas=3", "shop.gpus=1"), "3 GPUs"), (("shop.replicas=5", "shop.gpus=0.5"), "2.5 GPUs")],
)  # fmt: skip
def test_gpus_are_counted_over_replicas_and_ranks(sets: tuple[str, ...], total: str | None) -> None:
    faults = market(TWO_GPUS, *sets).faults
    if total is None:
        assert faults == ()
    else:
        [fault] = faults
        assert f"asks for {total}" in fault
        assert "there are 2" in fault


def test_each_rank_needs_a_gpu_of_its_own() -> None:
    assert market(TWO_GPUS, "shop.gpus=0.5", "shop.tp=2").faults == ()
    [fault] = market(TWO_GPUS, "shop.gpus=0.5", "shop.tp=3").faults
    assert fault == "node 'shop' needs 3 GPUs at once and there are 2; lower shop.tp"


def test_a_machine_without_a_gpu_is_a_warning() -> None:
    report = market(NO_GPU, "shop.gpus=8", "shop.tuning.mode=quick")
    assert report == Report(warnings=("no GPU here: 'shop' runs on the CPU",))


def test_two_nodes_on_one_port() -> None:
    second = Node(Customer)
    shop = Node(Shop)
    first = Node(Customer)
    nodes = {"customer": first, "second": second, "shop": shop}
    edges = (first.shop >> shop.into, second.shop >> shop.into)
    [fault] = make_report(*edges, **nodes).faults
    assert fault == "nodes 'customer' and 'second' both listen on port 8000; set second's to another, or to 0"
    assert make_report(*edges, sets=("second.port=0",), **nodes).faults == ()


def test_components_have_their_say_and_may_not_break_the_check() -> None:
    report = market(NO_GPU, "shop.size=2000", odd=Node(Broken))
    assert report.faults == (
        "node 'shop' is too large",
        "node 'odd': Broken.check raised RuntimeError: check is broken",
    )
    assert report.warnings == ("shop.tuning.mode is unset",)


def test_a_node_that_nothing_reaches_is_a_warning() -> None:
    assert "node 'reporter' has no edges: nothing reaches it" in market(reporter=Node(Reporter)).warnings


def test_an_empty_graph_is_a_fault() -> None:
    assert make_report().faults == ("graph 'market' has no nodes; give it edges, or nodes=(...)",)


def test_faults_found_while_resolving_come_first() -> None:
    resolved = settle(make_graph(), "shp.size=1", "shop.flavour=sour")
    faults = check(resolved.view, NO_GPU, resolved.faults).faults
    assert "no node 'shp'" in faults[0]
    assert "differ in flavour" in faults[1]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("decode.block_size=24", "block sizes of 'prefill' (16) and 'decode' (24) do not divide each other"),
        ("decode.dtype=float32", "differ in dtype: 'float32' and 'auto'"),
        ("prefill.model=other", "differ in model: 'smollm2-135m-instruct' and 'other'"),
        ("decode.hash_unit=5", "block_size 16 is no multiple of hash_unit 5"),
        ("decode.block_size=0", "decode.block_size = 0 does not fit: it must be at least 1"),
    ],
)
def test_rules_of_engine_workers(flag: str, words: str) -> None:
    assert any(words in fault for fault in shipped("disagg", flag).faults)


@pytest.mark.parametrize("sizes", [(16, 16), (64, 16), (16, 64), (48, 16)])
def test_block_sizes_that_divide_each_other_share_the_smaller_as_hash_unit(sizes: tuple[int, int]) -> None:
    resolved = settle(load_graph("graph/disagg.py"), f"prefill.block_size={sizes[0]}", f"decode.block_size={sizes[1]}")
    assert check(resolved.view, NO_GPU, resolved.faults).faults == ()
    units = {resolved.view.nodes[name].options["hash_unit"] for name in ("processor", "prefill", "decode")}
    assert units == {min(sizes)}


def test_an_unset_transceiver_backend_is_a_warning() -> None:
    report = shipped("disagg", "decode.cache_transceiver_config.backend=null")
    assert report.faults == ()
    assert any(
        "'Disaggregated serving is not enabled, please check the configuration'" in warning
        and "decode.cache_transceiver_config.backend=NIXL" in warning
        for warning in report.warnings
    )


def test_a_router_that_may_choose_an_unreachable_worker_is_a_fault() -> None:
    from components import DecodeWorker, PrefillWorker, Router
    from frontends import OpenAIFrontend, Processor

    frontend, processor, router = Node(OpenAIFrontend), Node(Processor), Node(Router)
    backend = {"backend": "NIXL"}
    prefill = Node(PrefillWorker, cache_transceiver_config=backend)
    one, two = (Node(DecodeWorker, cache_transceiver_config=backend) for _ in range(2))
    nodes = {"frontend": frontend, "processor": processor, "router": router, "prefill": prefill, "one": one, "two": two}
    edges = (
        frontend.requests >> processor.requests,
        processor.placement >> router.placement,
        processor.tokens >> one.requests,
        one.prefill >> prefill.requests,
        prefill.events >> router.events,
        one.events >> router.events,
        two.events >> router.events,
    )
    faults = make_report(*edges, **nodes).faults
    assert any("may send 'processor' to 'two'" in fault for fault in faults)
    assert any("may send 'two' to 'prefill'" in fault for fault in faults)
    assert "node 'one' asks 'prefill' for prompts but gets no KV blocks from it; link prefill.kv >> one.kv" in faults
