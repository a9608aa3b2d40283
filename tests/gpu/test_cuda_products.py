"""Every algorithm that cuBLASLt guesses multiplies right, in a CUDA graph as well.

python -m pytest tests/gpu/test_cuda_products.py
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
import torch

pytest.importorskip("nvmath")

from components.engine.products import Job, Problem, Products

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]

SHAPES = [
    (2, 96, 64),
    (8, 6_144, 4_096),
    (64, 4_096, 14_336),
    (200, 1_000, 576),
    (513, 4_096, 4_096),
    (1_100, 512, 256),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("is_added", [False, True])
def test_all_guesses_are_right(rows: int, outputs: int, inputs: int, is_added: bool, dtype: torch.dtype) -> None:
    from components.engine.cublaslt import CublasLt

    plan = CublasLt(torch.device("cuda")).plan(Problem(rows, outputs, inputs, dtype, is_added))
    assert plan is not None
    x, weight, before = _numbers(rows, outputs, inputs, dtype)
    expected = x.double() @ weight.double().t() + (before.double() if is_added else 0)
    guesses = plan.guesses()
    assert guesses
    for guess in guesses:
        assert plan.can_use(guess)
        out = before.clone()
        plan.run(guess, x, weight, out)
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


def test_a_search_is_kept_and_used_in_graphs(tmp_path: Path) -> None:
    from components.engine.cublaslt import CublasLt

    library = CublasLt(torch.device("cuda"))
    clock = count(0, -1)  # each seems faster than the one before, and torch's slowest
    products = Products(library.plan, tmp_path / "kept.json", measure=lambda run: (run(), float(next(clock)))[1])
    x, weight, before = _numbers(700, 6_144, 4_096, torch.bfloat16)
    products.tune([Job([weight], is_added, [1_024]) for is_added in (False, True)], lambda _: None)
    assert "null" not in (tmp_path / "kept.json").read_text()
    out, total = torch.empty_like(before), before.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products(x, weight, out)
        products.add(total, x, weight)
    graph.replay()
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(total.double(), expected + before.double(), rtol=0.02, atol=0.02)


def _numbers(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    make = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, inputs, generator=make, device="cuda", dtype=dtype)
    weight = torch.randn(outputs, inputs, generator=make, device="cuda", dtype=dtype) * inputs**-0.5
    before = torch.randn(rows, outputs, generator=make, device="cuda", dtype=dtype)
    return x, weight, before
