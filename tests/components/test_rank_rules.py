"""What the check says of nodes that cannot be divided among ranks."""

from __future__ import annotations

import pytest

from components import DecodeWorker, Worker
from components.rules import rank_faults
from graph.declare import NodeView


def make_node(component, *, tp, **options):
    return NodeView("w", component, 1, 0.0, tp, None, options, {})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"engine": "fake"}, "w.tp=1"),
        ({"engine": "torch", "cache_transceiver_config": {"backend": "memory"}}, "use NIXL"),
    ],
)
def test_what_knows_one_process_has_one_rank(options, word):
    (fault,) = rank_faults(make_node(DecodeWorker, tp=2, **options))

    assert "tp=2" in fault
    assert word in fault
    assert not list(rank_faults(make_node(DecodeWorker, tp=1, **options)))


def test_torch_and_nixl_divide_their_work():
    assert not list(rank_faults(make_node(Worker, tp=2, engine="torch")))
