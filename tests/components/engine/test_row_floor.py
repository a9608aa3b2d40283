"""The kernel that finds floors, compiled as C++: floors are those of sorted values and float64 weights.

A row's logits are scaled as the kernel scales them, in float32; everything after that is exact to float64's rounding.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from components.engine import row_floor
from components.engine.draw_settings import COLUMNS, DrawSettings
from components.engine.row_floor import make_row_floor, num_bins
from components.engine.runner import SampleRow
from components.messages import Sampling

H200, A100, CONSUMER = 232_448, 166_912, 101_376  # bytes of shared memory that a block may have
ROUNDING = 1e-6  # of a mass: within it, either of two neighbours is the value at which the mass is reached
WEIGHT = 1e-37  # where float32 weights are about to vanish, which tokens still have one does not matter
THREADS = 64

Floats = npt.NDArray[np.float64]
FindFloors = Callable[..., Floats]


@pytest.fixture(scope="module", params=[num_bins(H200), row_floor._FEWEST_BINS])
def find_floors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FindFloors:
    """Least logits that pass, by row; -inf where all do."""
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("no C++ compiler to compile row_floor.cu with")
    library = tmp_path_factory.mktemp("row_floor") / "row_floor.so"
    source, kernel = Path(__file__).with_name("row_floor_on_cpu.cpp"), Path(row_floor.__file__).parent
    macros = [f"-DBINS={request.param}", f"-DTHREADS={THREADS}", f"-DCOLUMNS={COLUMNS}", f"-I{kernel}"]
    options = ["-std=c++20", "-O2", "-fno-strict-aliasing", "-pthread", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, *macros, str(source), "-o", str(library)], check=True)
    run = ctypes.CDLL(str(library)).run

    def find(logits: torch.Tensor, settings: npt.NDArray[np.int64], num_threads: int) -> Floats:
        tokens, floors = logits.argmax(-1), np.full(len(settings), -1, np.int64)
        run(
            num_threads,
            len(settings),
            ctypes.c_void_p(logits.data_ptr()),
            ctypes.c_longlong(logits.stride(0)),
            ctypes.c_void_p(settings.ctypes.data),
            ctypes.c_void_p(tokens.data_ptr()),
            ctypes.c_void_p(floors.ctypes.data),
            logits.shape[1],
        )
        bits = np.where(floors >= 1 << 15, floors ^ 1 << 15, floors ^ 0xFFFF).astype(np.uint32) << 16
        return np.where(floors == 0, -np.inf, bits.view(np.float32).astype(np.float64))

    return find


class Expected:
    """What a row's floor must let pass, by numbers of its distinct values from the best downwards."""

    def __init__(self, logits: Floats, sampling: Sampling) -> None:
        self._values, numbers = (part[::-1] for part in np.unique(logits[logits > -np.inf], return_counts=True))
        below = (self._values - self._values[0]).astype(np.float32)
        scaled = below * (np.float32(1) / np.float32(sampling.temperature))
        is_in = scaled >= np.float32(np.log(sampling.min_p) if sampling.min_p else -np.inf)
        weights = np.exp(scaled.astype(np.float64))
        self._num_weighty = int((is_in & (weights > WEIGHT)).sum())
        numbers, weights = numbers[is_in], weights[is_in]
        masses, upto = np.cumsum(numbers * weights), np.cumsum(numbers)
        kth, total = len(numbers), masses[-1]
        if 0 < sampling.top_k < upto[-1]:
            kth = int(np.argmax(upto >= sampling.top_k))
            total = masses[kth] - (upto[kth] - sampling.top_k) * weights[kth]
        nuclei = range(len(numbers), len(numbers) + 1)
        if sampling.top_p < 1:
            wanted = float(np.float32(sampling.top_p)) * total
            nuclei = range(
                int(np.argmax(masses >= wanted * (1 - ROUNDING))),
                int(np.searchsorted(masses, wanted * (1 + ROUNDING))) + 1,
            )
        self.passing = {min(nucleus + 1, kth + 1, self._num_weighty) for nucleus in nuclei}

    def num_passing(self, floor: float) -> int:
        """How many of the values that carry weight a floor lets pass."""
        return min(int((self._values >= floor).sum()), self._num_weighty)


def make_logits(kind: str, deviation: float, vocab_size: int, rows: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(vocab_size + rows)
    logits = torch.randn(rows, vocab_size, generator=random) * deviation
    if kind == "masked":
        logits[:, 1::3] = float("-inf")
    elif kind == "one allowed":
        logits[:, 1:] = float("-inf")
    elif kind == "below zero":
        logits -= 300
    elif kind == "large":
        logits += 3e10  # beyond 2^33, where not all values below have bins
    elif kind == "all magnitudes":
        logits = torch.sign(logits) * torch.exp2(logits.abs() * 10 - 30)
    return logits.bfloat16()


def make_samplings(vocab_size: int, count: int) -> list[Sampling]:
    """Each kind of cut, and then any."""
    random = np.random.default_rng(vocab_size)
    made = [
        Sampling(top_p=0.95, temperature=0.8),
        Sampling(top_p=0.1, temperature=0.01),
        Sampling(top_p=0.999, temperature=2.0),
        Sampling(top_p=1e-50),
        Sampling(top_k=max(2, vocab_size - 1)),
        Sampling(top_k=max(2, vocab_size), top_p=0.5),
        Sampling(min_p=0.05, top_p=0.9),
        Sampling(min_p=1.0, top_k=2),
        Sampling(),
    ]
    while len(made) < count:
        made.append(
            Sampling(
                temperature=float(np.exp(random.uniform(np.log(0.01), np.log(2)))),
                top_k=int(np.exp(random.uniform(np.log(2), np.log(vocab_size + 2)))) if random.random() < 0.7 else 0,
                top_p=float(random.uniform(0.1, 0.999)) if random.random() < 0.7 else 1.0,
                min_p=float(random.uniform(0.0, 0.2)) if random.random() < 0.3 else 0.0,
            )
        )
    return made[:count]


def make_settings(samplings: list[Sampling], vocab_size: int) -> npt.NDArray[np.int64]:
    empty = np.empty(0, np.int32)
    rows = [SampleRow(i, sampling, 5, empty, empty) for i, sampling in enumerate(samplings)]
    return DrawSettings(samplings, vocab_size).at(rows)


def check(find_floors: FindFloors, logits: torch.Tensor, samplings: list[Sampling], num_threads: int) -> int:
    """Compares each row's floor; returns for how many rows only one is right."""
    floors = find_floors(logits, make_settings(samplings, logits.shape[1]), num_threads)
    num_unique = 0
    for row, sampling, floor in zip(logits.double().numpy(), samplings, floors, strict=True):
        expected = Expected(row, sampling)
        assert expected.num_passing(floor) in expected.passing, sampling
        num_unique += len(expected.passing) == 1
    return num_unique


@pytest.mark.parametrize("num_threads", [1, 4, 32])
@pytest.mark.parametrize("deviation", [0.0, 0.01, 1.28, 20.0])
@pytest.mark.parametrize("vocab_size", [1, 50, 1001, 32_003])
def test_floors_are_those_of_exact_arithmetic(
    vocab_size: int, deviation: float, num_threads: int, find_floors: FindFloors
) -> None:
    """An odd vocabulary's rows begin at any even address."""
    count = 10 if vocab_size > 10_000 else 40
    logits = make_logits("normal", deviation, vocab_size, count)
    assert check(find_floors, logits, make_samplings(vocab_size, count), num_threads) > 0.9 * count


@pytest.mark.parametrize("kind", ["masked", "one allowed", "below zero", "large", "all magnitudes"])
def test_rows_of_other_values(kind: str, find_floors: FindFloors) -> None:
    logits = make_logits(kind, 2.0, 5001, 24)
    assert check(find_floors, logits, make_samplings(5001, 24), 4) > 0.9 * 24


def test_a_row_of_a_models_vocabulary(find_floors: FindFloors) -> None:
    logits = make_logits("normal", 1.28, 128_256, 1)
    for num_threads in (1, 32):
        check(find_floors, logits, [Sampling(top_k=100, top_p=0.8)], num_threads)


def test_one_token_passes_a_top_k_of_one(find_floors: FindFloors) -> None:
    logits = make_logits("normal", 2.0, 1001, 1)
    settings = make_settings([Sampling(top_k=2)], 1001)
    settings[:, 2] = 1  # which is greedy, so that no draw asks for it
    assert find_floors(logits, settings, 4).tolist() == logits.double().amax(-1).tolist()


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("best", [0.0, -0.0])
def test_zeros_are_equal(best: float, num_threads: int, find_floors: FindFloors) -> None:
    row = torch.tensor([best, -best, 0.0, -0.0, -1.0, -2.0] + [-3.0] * 1000, dtype=torch.bfloat16)
    samplings = [Sampling(top_k=5), Sampling(top_k=4), Sampling(top_k=3), Sampling(top_p=0.05), Sampling(top_p=0.08)]
    check(find_floors, row.expand(len(samplings), -1).contiguous(), samplings, num_threads)


def test_rows_are_chosen_by_their_places(find_floors: FindFloors) -> None:
    """Greedy rows have no floors, and rows may lie apart."""
    logits = make_logits("normal", 2.0, 600, 4)[:, :501]
    settings = make_settings([Sampling(temperature=0.0), Sampling(top_k=3), Sampling(top_k=1), Sampling(top_k=7)], 501)
    best = logits.double().sort(dim=-1, descending=True).values
    assert find_floors(logits, settings, 4).tolist() == [best[1, 2], best[3, 6]]


def test_how_many_values_a_block_counts() -> None:
    assert num_bins(H200) == 53_248  # orders up to that of 2^33
    assert num_bins(A100) == 38_652
    assert num_bins(CONSUMER) is None


@pytest.mark.parametrize(
    ("shared_bytes", "reason"), [(H200, "cuda.core is not installed"), (CONSUMER, "shared memory")]
)
def test_why_a_gpu_does_without(
    shared_bytes: int, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setitem(sys.modules, "cuda", None)
    caplog.set_level(logging.WARNING, "components.engine.row_floor")
    assert make_row_floor(torch.device("cuda:0")) is None
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_tensors_on_the_cpu_do_without(caplog: pytest.LogCaptureFixture) -> None:
    assert make_row_floor(torch.device("cpu")) is None
    assert not caplog.records
