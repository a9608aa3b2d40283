"""Components and graphs for the tests of declaring: none of them can serve, all can be checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Annotated, Any, Literal

import msgspec

from graph import (
    Calls,
    Component,
    Graph,
    GraphView,
    Listen,
    Message,
    Node,
    NodeView,
    Options,
    Publishes,
    Receives,
    Sends,
    Serves,
    Subscribes,
    option,
)
from graph.config import Resolved, resolve
from graph.overrides import Overrides, read_overrides
from graph.resources import Machine


class Ask(Message, frozen=True, array_like=True, tag=True):
    n: int


class Answer(Message, frozen=True, array_like=True, tag=True):
    n: int


class Other(Message, frozen=True, array_like=True, tag=True):
    n: int


class Tuning(Options, frozen=True, kw_only=True):
    mode: Annotated[Literal["quick", "slow"] | None, option("how")] = None
    limit_ms: Annotated[int, option("how long")] = 100


class ShopOptions(Options, frozen=True, kw_only=True):
    flavour: Annotated[str, option("must agree", agrees=True, env="TEST_FLAVOUR")] = "plain"
    size: Annotated[int, option("how large", env="TEST_SIZE")] = 16
    ratio: float = 0.5
    is_open: Annotated[bool, option("whether", env="TEST_OPEN")] = True
    names: tuple[str, ...] = ()
    unit: Annotated[int, option("0: the smallest size")] = 0
    tuning: Tuning = Tuning()


class Shop(Component):
    Options = ShopOptions
    into = Serves(Ask, Answer, required=True)
    wares = Sends("wares")

    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        if node.options["size"] > 1000:
            yield f"node '{node.name}' is too large"

    @classmethod
    def warnings(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        if node.options["tuning"]["mode"] is None:
            yield f"{node.name}.tuning.mode is unset"

    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        sizes = [n.options["size"] for n in graph.nodes.values() if "size" in n.options]
        return {} if node.options["unit"] else {"unit": min(sizes)}


class CustomerOptions(Options, frozen=True, kw_only=True):
    flavour: Annotated[str, option("must agree", agrees=True)] = "plain"
    host: str = "127.0.0.1"
    port: int = 8000


class Customer(Component):
    Options = CustomerOptions
    listens = Listen()
    shop = Calls(Ask, Answer)
    basket = Receives("wares")


class Watcher(Component):
    news = Subscribes(Answer, Answer, required=True)


class Reporter(Component):
    news = Publishes(Answer, Answer)
    gossip = Publishes(Other, Other)


class Hasty(Component):
    """Calls what a shop does not serve."""

    shop = Calls(Other, Answer, required=False)


class Curious(Component):
    """Does not expect a shop's answer."""

    shop = Calls(Ask, Other, required=False)


def make_graph(**nodes: Node) -> tuple[Graph, ModuleType]:
    """A customer, a shop, and whatever else is given, as a graph file would declare them."""
    customer, shop = Node(Customer), Node(Shop)
    nodes = {"customer": customer, "shop": shop} | nodes
    return as_module(Graph("market", nodes["customer"].shop >> nodes["shop"].into, nodes=tuple(nodes.values())), nodes)


def as_module(graph: Graph, nodes: Mapping[str, Node]) -> tuple[Graph, ModuleType]:
    """The graph and a module that holds its nodes as variables."""
    module = ModuleType("market")
    module.__file__ = "/somewhere/market.py"
    vars(module).update(nodes)
    return graph, module


def settle(declared: tuple[Graph, ModuleType], *sets: str, **overrides: Any) -> Resolved:
    """Resolves with `--set`s and what else `read_overrides` takes."""
    return resolve(*declared, read_overrides(sets=sets, **overrides))


def view_of(declared: tuple[Graph, ModuleType], *sets: str, **overrides: Any) -> GraphView:
    """The view of a graph that must have no faults so far."""
    resolved = settle(declared, *sets, **overrides)
    assert resolved.faults == ()
    return resolved.view


NO_OVERRIDES = Overrides()
NO_GPU = Machine(num_cores=2)
TWO_GPUS = Machine(num_cores=2, gpus=("0", "1"))


class Strict(Options, frozen=True, kw_only=True):
    low: int = 0
    high: int = 9

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low must not exceed high")


class Picky(Component):
    Options = Strict


class Needy(Component):
    class Options(Options, frozen=True, kw_only=True):  # type: ignore[no-redef, misc]
        key: str
        count: Annotated[int, msgspec.Meta(ge=1)] = 1


class Broken(Component):
    @classmethod
    def check(cls, node: NodeView, graph: GraphView) -> Iterable[str]:
        raise RuntimeError("check is broken")


class Unresolvable(Component):
    @classmethod
    def resolve(cls, node: NodeView, graph: GraphView) -> Mapping[str, object]:
        raise RuntimeError("resolve is broken")
