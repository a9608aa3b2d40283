"""How many threads a step on the CPU is worth.

Every operator wakes the threads it is divided among, and waiting is passive so that engines do not spin in each
other's way: on small models a second thread costs a step of few tokens more than it brings (one request of the
default model on two Zen 3 cores: 44 ms a step on one thread, 49 to 76 ms on two; sixteen requests: the same).
"""

from __future__ import annotations

from torch import nn

from components.engine.fuse import PackedLinear

WORTH_S = 5e-4
"""A matrix product that takes one thread so long is worth dividing: some five times what waking a thread takes."""

_BYTES_PER_S = 10e9  # what one core reads, and
_FLOPS = 50e9  # multiplies; both are rough, and so is the answer
_WEIGHT_BYTES = 2


def mean_weights(model: nn.Module) -> float:
    """Weights of a model's linear layers on average, without the head; 0 where there are none."""
    sizes: list[int] = [
        module.in_features * module.out_features
        for module in model.modules()
        if isinstance(module, nn.Linear | PackedLinear)
    ]
    return sum(sizes) / len(sizes) if sizes else 0.0


def step_threads(num_tokens: int, weights: float, available: int) -> int:
    """Threads for a step of so many tokens through linear layers of so many weights each: one, or all."""
    alone_s = weights * max(_WEIGHT_BYTES / _BYTES_PER_S, 2 * num_tokens / _FLOPS)
    return available if alone_s >= WORTH_S or not weights else 1
