"""What the check says of times that a step may take."""

from __future__ import annotations

import pytest

from components import DecodeWorker
from components.rules import budget_faults
from graph.declare import NodeView


@pytest.mark.parametrize(("budget_ms", "num_faults"), [(None, 0), (0, 0), (20.0, 0), (-1.0, 1)])
def test_a_budget_is_no_negative_time(budget_ms: float | None, num_faults: int) -> None:
    node = NodeView("decode", DecodeWorker, 1, 0.0, 1, None, {"itl_budget_ms": budget_ms}, {})
    faults = list(budget_faults(node))
    assert len(faults) == num_faults
    assert all("itl_budget_ms=-1" in fault for fault in faults)
