"""How a decode step's attention is shared out.

python -m pytest tests/gpu/test_work_kernels.py                       on a CUDA device
TRITON_INTERPRET=1 python -m pytest tests/gpu/test_work_kernels.py    anywhere, by Triton's interpreter
"""

from __future__ import annotations

import os

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


def parts_of(
    lengths: list[int], kv_heads: int = 8, window: int | None = None, tile: int = 64, *, is_written: bool = True
) -> list[int]:
    """How many parts each sequence gets; they are checked to hold all its tokens once."""
    positions = torch.tensor([length - 1 for length in lengths], dtype=torch.int32, device=DEVICE)
    cu_blocks = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE) * 3
    work = share(
        positions, cu_blocks, kv_heads, is_written=is_written, window=window, tile=tile, max_sequences=MAX_SEQUENCES
    ).tolist()
    assert len(work) == most_work(len(lengths), kv_heads)
    count = next((i for i, record in enumerate(work) if record[0] < 0), len(work))
    assert all(record[0] == -1 for record in work[count:])
    parts, at = [0] * len(lengths), 0
    for number, (sequence, position, first_block, tile_number, stop, part, num_parts, base) in enumerate(work[:count]):
        assert (position, first_block) == (lengths[sequence] - 1, 3 * sequence)
        assert (part, base) == (parts[sequence], number - part)
        seen = 0 if window is None else max(0, lengths[sequence] - window) // tile * tile
        assert tile_number * tile == (at if part else seen)
        at = stop
        parts[sequence] += 1
        if parts[sequence] == num_parts:
            assert stop == lengths[sequence] - (not is_written)
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


def test_a_token_that_is_not_written_is_left_out() -> None:
    assert parts_of([1, 129, 640, 5_000], is_written=False)[0] == 1
    parts_of([1] * 64, is_written=False)


def test_few_sequences_are_cut_until_the_gpu_is_busy() -> None:
    assert parts_of([4_000])[0] * 8 >= 200
    assert parts_of([128]) == [1]
    assert parts_of([200] * 8, tile=128) == [2] * 8


def test_what_a_window_leaves_out_does_not_count() -> None:
    assert parts_of([200] * 63 + [16_000], window=256) == [1] * 64
    assert parts_of([200] * 63 + [16_000], window=8_000)[-1] > 1


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 300])
def test_all_the_work_has_room(kv_heads: int) -> None:
    for count in (1, 2, 17, 100, MAX_SEQUENCES):
        parts_of([(i * 7_919) % 9_973 + 1 for i in range(count)], kv_heads)
        parts_of([1] * (count - 1) + [100_000], kv_heads)
