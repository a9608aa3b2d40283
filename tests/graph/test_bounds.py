"""Bounds of options: every number of the shipped graphs has them, and what lies outside is told by one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from click.testing import CliRunner
from declared import NO_GPU, as_module, make_graph, settle

from components.options import FakeEngine
from components.worker import Worker
from graph import Component, Graph, Natural, Node, Options, Positive, Share, TcpPort, Time, Timeout, option
from graph.check import check
from graph.cli import cli
from graph.config import Resolved
from graph.draft import leaves_of
from graph.loader import load_graph


class Bounded(Component):
    class Options(Options, frozen=True, kw_only=True):  # type: ignore[no-redef, misc]
        natural: Natural = 0
        positive: Positive | None = None
        port: Annotated[TcpPort, option("has a variable", env="TEST_BOUNDED")] = 0
        share: Share = 1.0
        time: Time | None = None
        timeout: Timeout = 1.0


class Careless(Component):
    class Options(Options, frozen=True, kw_only=True):  # type: ignore[no-redef, misc]
        size: Positive = 0


def shipped_components() -> Iterator[type[Component]]:
    """The components of the shipped graphs, each once."""
    graphs = [load_graph(f"graph/{name}.py")[0] for name in ("agg", "disagg")]
    ends = [end for graph in graphs for edge in graph.edges for end in (edge.source, edge.target)]
    yield from dict.fromkeys(end.node.component for end in ends)


def unbounded(type_info: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    """The numbers in a type that lack a lower or an upper bound."""
    if isinstance(type_info, msgspec.inspect.Metadata):
        yield from unbounded(type_info.type)
    elif isinstance(type_info, msgspec.inspect.UnionType):
        for member in type_info.types:
            yield from unbounded(member)
    elif isinstance(type_info, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        has_lower = type_info.ge is not None or type_info.gt is not None
        has_upper = type_info.le is not None or type_info.lt is not None
        if not (has_lower and has_upper):
            yield type_info


def settle_shipped(name: str, *sets: str, **overrides: Any) -> Resolved:
    return settle(load_graph(f"graph/{name}.py"), *sets, **overrides)


@pytest.mark.parametrize("component", list(shipped_components()), ids=lambda component: component.__name__)
def test_every_number_has_bounds_on_both_sides(component: type[Component]) -> None:
    leaves = leaves_of(component.Options)
    assert leaves
    assert [path for path, leaf in leaves.items() if list(unbounded(msgspec.inspect.type_info(leaf.type)))] == []


def test_a_number_without_bounds_is_seen() -> None:
    for annotation in (int, float, int | None, float | None):
        assert list(unbounded(msgspec.inspect.type_info(annotation)))


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("worker.max_num_seqs=-1", "it must be at least 1"),
        ("worker.max_num_seqs=0", "it must be at least 1"),
        ("worker.max_num_batched_tokens=0", "it must be at least 1"),
        ("worker.max_model_len=1", "it must be at least 2"),
        ("worker.max_waiting=-1", "it must be at least 1"),
        ("worker.num_blocks=0", "it must be at least 1"),
        ("worker.num_blocks=2147483648", "it must be at most 2147483647"),
        ("worker.kv_memory_mb=-1", "it must be at least 1"),
        ("worker.gpu_memory_utilization=7", "it must be at most 1"),
        ("worker.gpu_memory_utilization=0", "it must be above 0"),
        ("worker.itl_budget_ms=-0.5", "it must be at least 0"),
        ("worker.hang_timeout_s=-1", "it must be above 0"),
        ("worker.hash_unit=-1", "it must be at least 0"),
        ("worker.fake.step_ms=-1", "it must be at least 0"),
        ("worker.device=tpu", "Invalid enum value 'tpu'; allowed: auto, cpu, cuda, cuda:0"),
        ("worker.dtype=float99", "Invalid enum value 'float99'; allowed: auto, float32, bfloat16, float16"),
        ("router.max_worker_requests=0", "it must be at least 1"),
        ("router.max_waiting=-5", "it must be at least 0"),
        ("router.max_wait_s=-1", "it must be at least 0"),
        ("router.max_wait_s=-1e3", "it must be at least 0"),
        ("router.max_wait_s=.inf", "it must be at most 1000000000"),
        ("router.max_wait_s=.nan", "it must be at least 0"),
        ("processor.max_model_len=1", "it must be at least 2"),
        ("frontend.max_body_mb=-1", "it must be at least 1"),
        ("frontend.body_timeout_s=0", "it must be above 0"),
        ("frontend.port=99999", "it must be at most 65535"),
        ("frontend.port=-1", "it must be at least 0"),
    ],
)
def test_a_flag_outside_is_refused_by_the_check(flag: str, reason: str) -> None:
    resolved = settle_shipped("agg", flag)
    name, _, value = flag.partition("=")
    assert check(resolved.view, NO_GPU, resolved.faults).faults == (f"--set: {name} = {value} does not fit: {reason}",)


@pytest.mark.parametrize(
    "sets",
    [
        ("router.max_waiting=0", "router.max_wait_s=0", "router.hash_unit=0", "router.max_indexed_blocks=0"),
        ("frontend.port=0", "frontend.port=65535"),
        ("decode.itl_budget_ms=0", "decode.max_local_prefill_length=0", "decode.fake.token_ms=0"),
        ("decode.num_blocks=null", "decode.max_model_len=null", "decode.itl_budget_ms=null"),
        ("decode.cache_transceiver_config.max_tokens_in_buffer=0", "decode.device=cuda:0"),
        ("decode.max_model_len=2", "decode.gpu_memory_utilization=1", "decode.block_size=1", "prefill.block_size=1"),
    ],
)
def test_values_with_a_meaning_of_their_own_are_allowed(sets: tuple[str, ...]) -> None:
    resolved = settle_shipped("disagg", *sets)
    assert check(resolved.view, NO_GPU, resolved.faults).faults == ()


def test_all_sources_are_bounded_and_told_together(tmp_path: Path) -> None:
    yaml = tmp_path / "wrong.yaml"
    yaml.write_text("bounded: {share: 7, time: -1}\n")
    node = Node(Bounded, positive=0)
    resolved = settle(
        as_module(Graph("g", nodes=(node,)), {"bounded": node}), "bounded.timeout=0", files=[yaml], port=1
    )
    assert resolved.faults == (
        "--port: no node listens; set the option of one node with --set node.port=...",
        "market.py: bounded.positive = 0 does not fit: it must be at least 1",
        f"{yaml}: bounded.share = 7 does not fit: it must be at most 1",
        f"{yaml}: bounded.time = -1 does not fit: it must be at least 0",
        "--set: bounded.timeout = 0 does not fit: it must be above 0",
    )


def test_an_environment_variable_is_bounded() -> None:
    resolved = settle(make_graph(bounded=Node(Bounded)), environ={"TEST_BOUNDED": "70000"})
    assert resolved.faults == ("environment TEST_BOUNDED: bounded.port = 70000 does not fit: it must be at most 65535",)


def test_a_group_given_as_a_struct_is_bounded() -> None:
    worker = Node(Worker, fake=FakeEngine(step_ms=-1.0))
    assert settle(as_module(Graph("g", nodes=(worker,)), {"worker": worker})).faults == (
        "market.py: worker.fake.step_ms = -1.0 does not fit: it must be at least 0",
    )


def test_a_default_outside_is_a_fault_too() -> None:
    [fault] = settle(make_graph(careless=Node(Careless))).faults
    assert "node 'careless' (Careless): Expected `int` >= 1" in fault


def test_the_command_tells_every_fault_and_fails() -> None:
    sets = ("worker.max_num_seqs=0", "router.max_wait_s=-1", "worker.dtype=float99")
    told = CliRunner().invoke(cli, ["check", "graph/agg.py", *(part for text in sets for part in ("--set", text))])
    assert told.exit_code == 1
    for text in sets:
        name, _, value = text.partition("=")
        assert f"--set: {name} = {value} does not fit: " in told.output
