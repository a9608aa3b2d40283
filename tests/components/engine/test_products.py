"""The choice of matrix products, with a library whose algorithms take a known time."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from components.engine.products import Algorithm, Job, Problem, Products, large_rows, make_products
from components.file_lock import locked

OUTPUTS, INPUTS = 6, 4


class Library:
    """Multiplies by torch, and knows what each of its algorithms takes; torch itself takes 1.0 s."""

    def __init__(self, seconds: dict[int, float], most_rows: int = 1 << 20) -> None:
        self.seconds, self.most_rows = seconds, most_rows
        self.ran: list[int] = []
        self.searched: list[str] = []

    def plan(self, problem: Problem) -> LibraryPlan | None:
        return LibraryPlan(self, problem) if problem.dtype is torch.float32 else None

    def measure(self, run: Callable[[], object]) -> float:
        self.ran.clear()
        run()
        return self.seconds[self.ran[-1]] if self.ran else 1.0


class LibraryPlan:
    def __init__(self, library: Library, problem: Problem) -> None:
        self.library, self.problem = library, problem

    def guesses(self) -> list[Algorithm]:
        self.library.searched.append(str(self.problem))
        return [np.array([number] * 8, np.uint64) for number in self.library.seconds]

    def can_use(self, algorithm: Algorithm) -> bool:
        return self.problem.rows <= self.library.most_rows

    def run(self, algorithm: Algorithm, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        assert self.problem[:3] == (len(x), *weight.shape)
        self.library.ran.append(int(algorithm[0]))
        product = x @ weight.t()
        out.copy_(out + product if self.problem.is_added else product)


def make_weights(count: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(OUTPUTS, INPUTS, dtype=dtype) for _ in range(count)]


def tuned(library: Library, file: Path | None, *, rows: list[int], is_added: bool = False) -> Products:
    products = Products(library.plan, file, measure=library.measure)
    products.tune([Job(make_weights(), is_added, rows)], lambda _: None)
    library.ran.clear()
    return products


@pytest.mark.parametrize(
    ("seconds", "expected"), [({1: 0.9, 2: 0.5, 3: 0.7}, [2]), ({1: 1.2}, []), ({1: 0.995}, [])], ids=str
)
def test_the_fastest_is_chosen_if_it_is_worth_it(seconds: dict[int, float], expected: list[int]) -> None:
    library = Library(seconds)
    products = tuned(library, None, rows=[5])
    x, weight = torch.randn(5, INPUTS), make_weights(1)[0]
    torch.testing.assert_close(products(x, weight), x @ weight.t())
    assert library.ran == expected


def test_products_are_added_and_put_where_they_belong() -> None:
    library = Library({7: 0.1})
    products = tuned(library, None, rows=[5], is_added=True)
    x, weight, total = torch.randn(5, INPUTS), make_weights(1)[0], torch.randn(5, OUTPUTS)
    expected = total + x @ weight.t()
    products.add(total, x, weight)
    torch.testing.assert_close(total, expected)
    assert library.ran == [7]
    out = torch.empty(5, OUTPUTS)
    assert products(x, weight, out) is out  # a kind that was not searched for: torch's
    torch.testing.assert_close(out, x @ weight.t())
    assert library.ran == [7]


def test_many_rows_go_by_the_next_multiple() -> None:
    assert large_rows(512) == []
    assert large_rows(1_500) == [512, 1_024, 1_536]
    library = Library({3: 0.2}, most_rows=1_300)
    products = tuned(library, None, rows=large_rows(1_500))
    weight = make_weights(1)[0]
    for rows, expected in ((1_200, [3]), (1_400, []), (300, []), (512, [3])):  # the second is none of the algorithm's
        library.ran.clear()
        x = torch.randn(rows, INPUTS)
        torch.testing.assert_close(products(x, weight), x @ weight.t())
        assert library.ran == expected, rows


def test_what_was_found_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "new" / "gpu.json"
    tuned(Library({4: 0.5}), file, rows=[2, 5])
    assert json.loads(file.read_text()) == {"2x6x4 float32": [4] * 8, "5x6x4 float32": [4] * 8}
    later = Library({9: 0.1})
    products = tuned(later, file, rows=[5, 8])
    assert later.searched == ["8x6x4 float32"]
    x, weight = torch.randn(5, INPUTS), make_weights(1)[0]
    products(x, weight)
    assert later.ran == [4]
    assert len(json.loads(file.read_text())) == 3


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"2x6x4 float32": [1]}', '{"2x6x4 float32": [-1,0,0,0,0,0,0,0]}'])
def test_a_broken_file_is_searched_anew(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(text)
    with caplog.at_level(logging.WARNING, "components.engine.products"):
        tuned(Library({4: 0.5}), file, rows=[2])
    assert str(file) in caplog.text
    assert json.loads(file.read_text()) == {"2x6x4 float32": [4] * 8}


def test_a_folder_that_cannot_be_written_only_costs_the_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    library = Library({4: 0.5})
    with caplog.at_level(logging.WARNING, "components.engine.products"):
        products = tuned(library, tmp_path / "file" / "gpu.json", rows=[2])
    assert "not kept" in caplog.text
    products(torch.randn(2, INPUTS), make_weights(1)[0])
    assert library.ran == [4]


def test_a_file_that_says_all_is_read_whoever_holds_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "gpu.json"
    tuned(Library({4: 0.5}), file, rows=[2])
    monkeypatch.setattr("components.engine.products._TIMEOUT_S", 0.2)
    with locked(file.with_suffix(".lock"), timeout_s=1.0):
        later = Library({9: 0.1})
        products = tuned(later, file, rows=[2])
        products(torch.randn(2, INPUTS), make_weights(1)[0])
        assert (later.searched, later.ran) == ([], [4])


def test_who_waits_too_long_for_others_searches_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "gpu.json"
    monkeypatch.setattr("components.engine.products._TIMEOUT_S", 0.2)
    library = Library({9: 0.1})
    with (
        locked(file.with_suffix(".lock"), timeout_s=1.0),
        caplog.at_level(logging.WARNING, "components.engine.products"),
    ):
        products = tuned(library, file, rows=[2])
    assert "not kept" in caplog.text
    assert not file.exists()
    products(torch.randn(2, INPUTS), make_weights(1)[0])
    assert library.ran == [9]


def test_a_library_that_cannot_be_used_leaves_products_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("components.engine.products.find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "nvmath", None)
    with caplog.at_level(logging.WARNING, "components.engine.products"):
        products = make_products(torch.device("cpu"))
    assert "left to torch" in caplog.text
    x, weight = torch.randn(2, INPUTS), make_weights(1)[0]
    torch.testing.assert_close(products(x, weight), x @ weight.t())


def test_kinds_that_the_library_does_not_make_are_torchs() -> None:
    library = Library({4: 0.5})
    products = Products(library.plan, measure=library.measure)
    weights = make_weights(dtype=torch.float64)
    products.tune([Job(weights, False, [2])], lambda _: None)
    x = torch.randn(2, INPUTS, dtype=torch.float64)
    torch.testing.assert_close(products(x, weights[0]), x @ weights[0].t())
    assert library.ran == []
