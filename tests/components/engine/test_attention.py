"""Attention by torch and written out give the same; what only some devices take is tried here as well."""

from __future__ import annotations

import pytest
import torch

from components.engine.attention import Shape, _attend, _attend_last_apart, _attend_plainly
from components.engine.flash import obstacle


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("num_queries", [2, 33, 65])
def test_the_last_query_apart_is_the_same(num_queries: int, window: int | None) -> None:
    heads, group, head_dim, num_keys = 2, 3, 8, 80
    torch.manual_seed(0)
    queries, keys, values = (
        torch.randn(size)
        for size in ((heads, group, num_queries, head_dim), (heads, num_keys, head_dim), (heads, num_keys, head_dim))
    )
    at = torch.arange(70 - num_queries, 70)[:, None]
    seen = torch.arange(num_keys) <= at
    if window is not None:
        seen &= torch.arange(num_keys) > at - window
    bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf")).expand(heads, 1, -1, -1)
    call = (queries, keys, values, bias, Shape(head_dim**-0.5, window))
    together = _attend(*call)
    torch.testing.assert_close(_attend_last_apart(*call), together)
    torch.testing.assert_close(_attend_plainly(*call), together)


def test_flashinfer_is_not_taken_for_models_with_sinks() -> None:
    assert obstacle(torch.bfloat16, 64, has_sinks=True) == "the model's attention has sinks"
