"""Configuration: precedence, origins, and faults that name the option and the nearest known one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from declared import Needy, Picky, Shop, ShopOptions, Unresolvable, as_module, make_graph, settle, view_of

from graph import DeclarationError, Graph, Node
from graph.config import frozen_view
from graph.overrides import read_overrides


def write_yaml(folder: Path, text: str, name: str = "overrides.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_values_come_from_the_strongest_and_say_so(tmp_path: Path) -> None:
    weak = write_yaml(tmp_path, "shop: {size: 3}\n")
    strong = write_yaml(tmp_path, "shop: {size: 4}\n", "strong.yaml")
    environ = {"TEST_SIZE": "1"}
    steps: list[tuple[dict[str, Any], tuple[str, ...], dict[str, Any], int, str]] = [
        ({}, (), {}, 16, "default"),
        ({}, (), {"environ": environ}, 1, "environment TEST_SIZE"),
        ({"size": 2}, (), {"environ": environ}, 2, "file"),
        ({"size": 2}, (), {"environ": environ, "files": [weak]}, 3, str(weak)),
        ({"size": 2}, (), {"environ": environ, "files": [weak, strong]}, 4, str(strong)),
        ({"size": 2}, ("shop.size=5",), {"environ": environ, "files": [weak, strong]}, 5, "--set"),
        ({"size": 2}, ("shop.size=5", "shop.size=6"), {}, 6, "--set"),
    ]
    for options, sets, overrides, value, origin in steps:
        node = view_of(make_graph(shop=Node(Shop, **options)), *sets, **overrides).nodes["shop"]
        assert (node.options["size"], node.origins["size"]) == (value, origin)


def test_a_group_merges_key_by_key(tmp_path: Path) -> None:
    file = write_yaml(tmp_path, "shop: {tuning: {limit_ms: 7}}\n")
    declared = make_graph(shop=Node(Shop, tuning={"mode": "quick"}))
    node = view_of(declared, files=[file]).nodes["shop"]
    assert node.options["tuning"] == {"mode": "quick", "limit_ms": 7}
    assert node.origins["tuning.mode"] == "file"
    assert node.origins["tuning.limit_ms"] == str(file)


def test_a_dotted_flag_reaches_into_a_group() -> None:
    frozen = view_of(make_graph(), "shop.tuning.mode=slow").nodes["shop"].frozen()
    assert isinstance(frozen, ShopOptions)
    assert frozen.tuning.mode == "slow"
    assert frozen.tuning.limit_ms == 100


def test_the_frozen_options_are_frozen() -> None:
    frozen = view_of(make_graph()).nodes["shop"].frozen()
    with pytest.raises(AttributeError):
        frozen.size = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("flag", "option", "value"),
    [
        ("shop.size=3", "size", 3),
        ("shop.ratio=1", "ratio", 1.0),
        ("shop.ratio=1e-3", "ratio", 1e-3),
        ("shop.is_open=false", "is_open", False),
        ("shop.is_open=0", "is_open", False),
        ("shop.flavour=12", "flavour", "12"),
        ("shop.flavour=no", "flavour", "no"),
        ("shop.flavour=a=b.c", "flavour", "a=b.c"),
        ("shop.names=[a, b]", "names", ("a", "b")),
        ("shop.tuning={mode: slow}", "tuning", {"mode": "slow", "limit_ms": 100}),
    ],
)
def test_flags_are_read_as_yaml_scalars(flag: str, option: str, value: object) -> None:
    assert view_of(make_graph(), flag).nodes["shop"].options[option] == value


def test_resources_are_set_like_options() -> None:
    node = view_of(make_graph(), "shop.replicas=3", "shop.gpus=0.5", "shop.tp=2", "shop.cores=1").nodes["shop"]
    assert (node.replicas, node.gpus, node.tp, node.cores) == (3, 0.5, 2, 1.0)
    assert node.origins["replicas"] == "--set"


def test_an_environment_variable_that_is_empty_counts_as_unset() -> None:
    assert view_of(make_graph(), environ={"TEST_SIZE": ""}).nodes["shop"].origins["size"] == "default"


def test_a_flag_like_variable_is_read_as_a_bool() -> None:
    assert view_of(make_graph(), environ={"TEST_OPEN": "0"}).nodes["shop"].options["is_open"] is False


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("shp.size=3", "there is no node 'shp'; did you mean 'shop'?"),
        ("shop.siez=3", "node 'shop' (Shop) has no option 'siez'; did you mean 'size'?"),
        ("shop.replica=3", "did you mean 'replicas'?"),
        ("shop.tuning.limit=3", "did you mean 'tuning.limit_ms'?"),
        ("shop.size.more=3", "has no option 'size.more'"),
        ("shop.zzz=3", "it has replicas, gpus"),
        ("shop.size=big", "shop.size = big does not fit: Expected `int`, got `str`"),
        ("shop.replicas=1.5", "shop.replicas = 1.5 does not fit: Expected `int`, got `float`"),
        ("shop.tuning.mode=lazy", "Invalid enum value 'lazy'; allowed: quick, slow, null"),
        ("shop.tuning=3", "shop.tuning is a group of options; set one of mode, limit_ms"),
    ],
)
def test_what_does_not_fit_is_a_fault_and_the_weaker_value_stands(flag: str, words: str) -> None:
    resolved = settle(make_graph(), flag)
    [fault] = resolved.faults
    assert fault.startswith("--set: ")
    assert words in fault
    assert resolved.view.nodes["shop"].options["size"] == 16


def test_all_faults_are_told_at_once() -> None:
    resolved = settle(make_graph(shop=Node(Shop, sise=3)), "shp.x=1", "shop.size=big", environ={"TEST_SIZE": "huge"})
    assert [fault.partition(": ")[0] for fault in resolved.faults] == [
        "environment TEST_SIZE",
        "market.py",
        "--set",
        "--set",
    ]
    with pytest.raises(DeclarationError, match="did you mean 'shop'"):
        frozen_view(resolved)


def test_host_and_port_go_to_the_node_that_listens() -> None:
    node = view_of(make_graph(), host="0.0.0.0", port=0).nodes["customer"]
    assert (node.options["host"], node.options["port"]) == ("0.0.0.0", 0)
    assert node.origins["port"] == "--port"


def test_port_is_a_fault_where_nobody_listens() -> None:
    shop = Node(Shop)
    [fault] = settle(as_module(Graph("dark", nodes=(shop,)), {"shop": shop}), port=1).faults
    assert "no node listens" in fault


def test_model_needs_a_node_that_has_one() -> None:
    assert settle(make_graph(), model="m").faults == ("--model: no node has an option 'model'",)


@pytest.mark.parametrize("file", ["graph/disagg.py", "graph/agg.py"])
@pytest.mark.parametrize("model", ["somewhere/model", None])
def test_model_reaches_every_node_that_has_one(file: str, model: str | None) -> None:
    from graph.loader import load_graph

    view = view_of(load_graph(file), model=model, environ={"HEADRACE_MODEL": "weaker/model"})
    models = {name: node.options["model"] for name, node in view.nodes.items() if "model" in node.options}
    assert models == dict.fromkeys(view.nodes.keys() - {"frontend", "router"}, model or "weaker/model")


def test_the_transfer_variables_reach_both_workers() -> None:
    from graph.loader import load_graph

    environ = {"HEADRACE_DISABLE_KV_CACHE_TRANSFER_OVERLAP": "1", "HEADRACE_NIXL_KVCACHE_BACKEND": "LIBFABRIC"}
    view = view_of(load_graph("graph/disagg.py"), environ=environ)
    for name in ("prefill", "decode"):
        options = view.nodes[name].options
        assert options["disable_kv_cache_transfer_overlap"] is True
        assert options["nixl_backend"] == "LIBFABRIC"


def test_what_was_left_open_is_resolved_from_the_whole_graph() -> None:
    node = view_of(make_graph(small=Node(Shop, size=4)), "shop.size=8").nodes["shop"]
    assert (node.options["unit"], node.origins["unit"]) == (4, "resolved")
    assert view_of(make_graph(), "shop.unit=2").nodes["shop"].origins["unit"] == "--set"


def test_an_option_without_a_default_must_be_set() -> None:
    declared = make_graph(needy=Node(Needy))
    assert settle(declared).faults == ("node 'needy' needs a value for 'key'; set it with --set needy.key=...",)
    assert view_of(declared, "needy.key=x").nodes["needy"].options["key"] == "x"
    assert "it must be at least 1" in settle(declared, "needy.key=x", "needy.count=0").faults[0]


def test_options_that_do_not_fit_together_are_a_fault() -> None:
    [fault] = settle(make_graph(picky=Node(Picky)), "picky.low=10").faults
    assert fault == "node 'picky' (Picky): low must not exceed high"


def test_a_resolve_that_raises_is_a_fault_of_its_component() -> None:
    [fault] = settle(make_graph(odd=Node(Unresolvable))).faults
    assert fault == "node 'odd': Unresolvable.resolve raised RuntimeError: resolve is broken"


def test_an_options_value_in_the_file_may_be_a_struct() -> None:
    node = view_of(make_graph(shop=Node(Shop, tuning=ShopOptions().tuning))).nodes["shop"]
    assert node.options["tuning"] == {"mode": None, "limit_ms": 100}


def test_names_come_from_variables_or_name() -> None:
    one, two = Node(Shop), Node(Shop, name="second")
    view = view_of(as_module(Graph("g", nodes=(one, two)), {"first": one, "ignored": two}))
    assert list(view.nodes) == ["first", "second"]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (Node(Shop), "a Shop node has no name; assign it to a variable"),
        (Node(Shop, name="shop"), "two nodes are named 'shop'; rename one of them"),
        (Node(Shop, name="a/b"), "node name 'a/b' must be made of"),
    ],
)
def test_nodes_without_a_good_name_are_faults_and_stay_in_the_view(node: Node, words: str) -> None:
    shop = Node(Shop)
    resolved = settle(as_module(Graph("g", nodes=(shop, node)), {"shop": shop}))
    assert words in resolved.faults[0]
    assert len(resolved.view.nodes) == 2


def test_a_graphs_name_must_be_fit_for_a_folder() -> None:
    assert "graph's name '../x'" in settle(as_module(Graph("../x"), {})).faults[0]


@pytest.mark.parametrize("flag", ["shop", "shop=3", "shop.=3", ".size=3", "size"])
def test_a_malformed_flag_is_refused(flag: str) -> None:
    with pytest.raises(DeclarationError, match="not of the form"):
        read_overrides(sets=[flag])


@pytest.mark.parametrize(
    ("text", "words"),
    [("[1, 2]", "at its top level"), ("shop: 3", "must be a mapping"), ("{", "is not YAML")],
)
def test_a_malformed_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match=words):
        read_overrides(files=[write_yaml(tmp_path, text)])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="No such file"):
        read_overrides(files=[tmp_path / "nothing.yaml"])


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert read_overrides(files=[write_yaml(tmp_path, "")]).settings == ()


def test_views_can_be_sent_as_plain_values() -> None:
    node = view_of(make_graph()).nodes["shop"]
    assert msgspec.json.decode(msgspec.json.encode(node.options))["tuning"] == {"mode": None, "limit_ms": 100}
