"""A model cut among ranks gives what the whole one gives; the ranks are threads here, and their sums are real."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_torch_runner import BLOCK, Sequences, save_model

from components.engine import torch_runner
from components.engine.parallel import ParallelRunner, Place
from components.engine.torch_runner import TorchRunner
from components.options import WorkerOptions
from graph import LaunchError

PROMPTS = [[5, 17, 23, 42, 11, 8, 99], [7, 3, 150], [61] * 12]


class Meeting:
    """What threads that stand for ranks use in the place of torch.distributed."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.parts: dict[int, Any] = {}

    def gather(self, rank: int, part: Any) -> list[Any]:
        """Every rank's part, in the order of ranks."""
        self.parts[rank] = part
        self.barrier.wait()
        parts = [self.parts[i] for i in sorted(self.parts)]
        self.barrier.wait()
        return parts

    def ranks(self, rank: int, size: int, *, store: str, device: torch.device) -> MeetingRanks:
        return MeetingRanks(self, rank, size)


class MeetingRanks:
    """`Ranks` over a `Meeting`."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meeting.gather(self.rank, partial)).sum(0)

    def least(self, number: int) -> int:
        return min(self._meeting.gather(self.rank, number))

    def close(self) -> None: ...


def one_at_a_time(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load` under a lock: transformers changes the state of the whole process while it makes a model."""
    lock = threading.Lock()

    def locked(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return load(*args, **kwargs)

    return locked


class Threads:
    """Ranks 1 and up, each on a thread, and rank 0 beside them."""

    def __init__(self, options: WorkerOptions, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch_runner, "Ranks", Meeting(size).ranks)
        monkeypatch.setattr(torch_runner, "load_model", one_at_a_time(torch_runner.load_model))
        self.place = Place(0, size, "")
        self.pool = ThreadPoolExecutor(size)
        made = [self.pool.submit(TorchRunner, options, place=Place(rank, size, "")) for rank in range(size)]
        self.runners = [runner.result() for runner in made]
        self.whole = ParallelRunner(self.runners[0], self)

    def run(self, batch: Any) -> None:
        for runner in self.runners[1:]:
            self.pool.submit(runner.execute, type(batch)(**{**_fields(batch), "samples": ()}))


def _fields(batch: Any) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in batch.__struct_fields__}


def options_of(folder: Path, **more: Any) -> WorkerOptions:
    return WorkerOptions(model=str(folder), device="cpu", dtype="float32", num_blocks=40, block_size=BLOCK, **more)


def generate(runner: Any) -> list[list[int]]:
    sequences = Sequences(runner, PROMPTS)
    sequences.step({0: 4, 2: 12})
    sequences.step({0: 3, 1: 3, 2: 1})
    for _ in range(8):
        sequences.step({0: 1, 1: 1, 2: 1})
    return sequences.tokens


NINE: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
CASES = [
    ("llama", NINE, 2),  # the default model's heads: 6 and 3
    ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2}, 4),  # each KV head on two ranks
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2}, 3),
    ("llama-bias", {}, 2),
    ("qwen2", {}, 2),
    ("qwen3", {}, 2),
    ("mistral-window", {}, 2),
    ("gemma2", {}, 2),
]


@pytest.mark.parametrize(
    ("name", "changes", "size"), CASES, ids=[f"{n}-tp{s}-{i}" for i, (n, _, s) in enumerate(CASES)]
)
def test_ranks_together_choose_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any], size: int
) -> None:
    folder = save_model(tmp_path, name, **changes)
    expected = generate(TorchRunner(options_of(folder)))

    threads = Threads(options_of(folder), size, monkeypatch)

    assert generate(threads.whole) == expected
    layouts = [runner.layout for runner in threads.runners]
    assert {head for layout in layouts for head in range(layout.head_start, layout.head_stop)} == set(
        range(layouts[0].num_kv_heads)
    )


def test_every_rank_has_as_many_blocks_as_the_one_with_the_least_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path, "llama", **NINE)
    options = WorkerOptions(model=str(folder), device="cpu", dtype="float32", kv_memory_mb=1, block_size=BLOCK)

    runners = Threads(options, 2, monkeypatch).runners

    assert runners[0].num_blocks == runners[1].num_blocks
    assert runners[0].region.block_bytes == 2 * runners[1].region.block_bytes
    assert np.isclose(runners[0].num_blocks * runners[0].region.block_bytes, 1 << 20, rtol=0.05)


def test_models_of_another_shape_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path, "mixtral")

    with pytest.raises(LaunchError, match="MixtralForCausalLM cannot be divided among ranks"):
        Threads(options_of(folder), 2, monkeypatch)
