"""Threads of a step: one where waking more costs what they bring."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from components.engine.fuse import PackedLinear
from components.engine.threads import mean_weights, step_threads

SMALL, LARGE = 885_000.0, 100e6  # a linear layer of a model of 135 M parameters, and one of 8 G


@pytest.mark.parametrize(
    ("num_tokens", "weights", "threads"),
    [(1, SMALL, 1), (8, SMALL, 1), (32, SMALL, 2), (256, SMALL, 2), (1, LARGE, 2), (0, SMALL, 1), (1, 0.0, 2)],
)
def test_threads(num_tokens: int, weights: float, threads: int) -> None:
    assert step_threads(num_tokens, weights, 2) == threads


def test_mean_of_plain_and_packed_layers() -> None:
    layers = nn.Sequential(nn.Linear(8, 4), nn.SiLU(), nn.Linear(4, 16))
    assert mean_weights(layers) == (32 + 64) / 2
    if "fbgemm" in torch.backends.quantized.supported_engines:
        assert mean_weights(PackedLinear(nn.Linear(8, 4))) == 32
    assert mean_weights(nn.Sequential(nn.SiLU())) == 0
