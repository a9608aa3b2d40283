"""How a decode step's attention is shared out.

python -m pytest tests/gpu/test_work_kernels.py                       on a CUDA device
TRITON_INTERPRET=1 python -m pytest tests/gpu/test_work_kernels.py    anywhere, by Triton's interpreter
"""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from components.engine.work_kernels import most_work, share

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
MAX_SEQUENCES = 256

pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]


def parts_of(lengths: list[int], kv_heads: int = 8, window: int | None = None, tile: int = 64) -> list[int]:
    """How many parts each sequence gets."""
    positions = torch.tensor([length - 1 for length in lengths], dtype=torch.int32, device=DEVICE)
    shares = share(positions, kv_heads, window=window, tile=tile, max_sequences=MAX_SEQUENCES)
    work, firsts = shares.work.tolist(), shares.firsts.tolist()
    parts = [stop - first for first, stop in pairwise(firsts)]
    assert len(work) == most_work(len(lengths), kv_heads)
    assert work[: firsts[-1]] == [i for i, count in enumerate(parts) for _ in range(count)]
    assert set(work[firsts[-1] :]) <= {-1}
    assert min(parts) >= 1
    return parts


@pytest.mark.parametrize("length", [1, 200, 511, 2_100, 16_000])
@pytest.mark.parametrize("count", [32, 64, 256])
def test_sequences_of_like_lengths_stay_whole_where_there_are_many(count: int, length: int) -> None:
    assert parts_of([length] * count) == [1] * count


@pytest.mark.parametrize(("count", "most_tokens"), [(63, 1_024), (255, 1_024)])
def test_a_long_one_among_short_ones_is_cut(count: int, most_tokens: int) -> None:
    *short, long = parts_of([200] * count + [16_000])
    assert short == [1] * count
    assert 16_000 / long <= most_tokens


def test_few_sequences_are_cut_until_the_gpu_is_busy() -> None:
    assert parts_of([4_000])[0] * 8 >= 200
    assert parts_of([128]) == [1]
    assert parts_of([200] * 8) == [2] * 8


def test_what_a_window_leaves_out_does_not_count() -> None:
    assert parts_of([200] * 63 + [16_000], window=256) == [1] * 64
    assert parts_of([200] * 63 + [16_000], window=8_000)[-1] > 1


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 300])
def test_all_the_work_has_room(kv_heads: int) -> None:
    for count in (1, 2, 17, 100, MAX_SEQUENCES):
        parts_of([(i * 7_919) % 9_973 + 1 for i in range(count)], kv_heads)
        parts_of([1] * (count - 1) + [100_000], kv_heads)
