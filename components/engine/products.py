"""Matrix products on CUDA, each by the algorithm that was the fastest for its shape on this GPU.

torch has cuBLAS guess. On an H200 one of cuBLASLt's next guesses was faster by 3 to 6 % over a layer's products of 64
to 192 rows of Llama-8B's shape, and by 5 % at 4,096. What was found is kept in a file, by which workers on one host
choose alike, and a restart need not search again.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from components.file_lock import locked
from components.model_cache import cache_root
from graph import LaunchError

_STEP = 512  # rows: larger products go by the next multiple, which has nearly as many tiles
_COLD_BYTES = 600 << 20  # of weights until one is used again, so that no cache has it
_MOST_WEIGHTS, _FEWEST_WEIGHTS = 8, 2
_ROUNDS = 5
_TIMEOUT_S = 300.0
_MOST_KEPT = 4096  # kinds of products; steps of any number of tokens may come
_WORTH = 0.99  # of the time of torch's product; a smaller gain may be none

_Words = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=8, max_length=8)]
_Choices = dict[str, _Words | None]

log = logging.getLogger(__name__)

Algorithm = npt.NDArray[np.uint64]  # (8,): what cuBLASLt knows an algorithm by


class Problem(NamedTuple):
    """A kind of product: x, (rows, inputs), by the transpose of a weight, (outputs, inputs)."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    is_added: bool  # to what stands there

    def __str__(self) -> str:
        kind = f"{self.rows}x{self.outputs}x{self.inputs} {str(self.dtype).removeprefix('torch.')}"
        return f"{kind} added" if self.is_added else kind

    @property
    def searched(self) -> Problem:
        """The kind whose search this one goes by."""
        return self if self.rows <= _STEP else self._replace(rows=_stepped(self.rows))


def _problem(rows: int, weight: torch.Tensor, *, is_added: bool) -> Problem:
    outputs, inputs = weight.shape
    return Problem(rows, outputs, inputs, weight.dtype, is_added)


def large_rows(most: int) -> list[int]:
    """The numbers of rows that products of `most` rows and fewer go by, above those of small steps."""
    return list(range(_STEP, _stepped(most) + 1, _STEP)) if most > _STEP else []


def _stepped(rows: int) -> int:
    return -(-rows // _STEP) * _STEP


class Plan(Protocol):
    """A kind of product as a library knows it."""

    def guesses(self) -> list[Algorithm]:
        """Algorithms that may be fast; none where the library knows none."""

    def can_use(self, algorithm: Algorithm) -> bool:
        """Whether an algorithm of a like kind is one of this kind, too."""

    def run(self, algorithm: Algorithm, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Launches the product on the current stream."""


class Job(NamedTuple):
    """Weights of one shape, and the numbers of rows they are multiplied by."""

    weights: Sequence[torch.Tensor]
    is_added: bool
    rows: Iterable[int]

    def problems(self) -> list[Problem]:
        """The kinds of products of the job."""
        return [_problem(rows, self.weights[0], is_added=self.is_added) for rows in self.rows]


def _no_library(_: Problem) -> None:
    """Makes no plan: all products are torch's."""


class Products:
    """Products by the weights of a model. Those that were not searched for are torch's."""

    def __init__(
        self,
        make_plan: Callable[[Problem], Plan | None] = _no_library,
        file: Path | None = None,
        *,
        measure: Callable[[Callable[[], object]], float] | None = None,
    ) -> None:
        """`make_plan` gives None for products that its library is not to make; `file` keeps what searches find.

        `measure` gives the seconds of what it runs: a GPU's, unless told otherwise.
        """
        self._make_plan = make_plan
        self._file = file
        self._measure = measure or gpu_seconds
        self._choices: _Choices = {}  # by `str(Problem)`; None where torch is as fast
        self._chosen: dict[Problem, tuple[Plan, Algorithm] | None] = {}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x, (rows, inputs), by the transpose of `weight`, (outputs, inputs): (rows, outputs), in `out` if given."""
        chosen = self._choice(_problem(len(x), weight, is_added=False))
        if chosen is None:
            return torch.mm(x, weight.t(), out=out)
        if out is None:
            out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
        plan, algorithm = chosen
        plan.run(algorithm, x, weight, out)
        return out

    def add(self, total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Adds such a product to `total`, (rows, outputs)."""
        chosen = self._choice(_problem(len(x), weight, is_added=True))
        if chosen is None:
            total.addmm_(x, weight.t())
        else:
            plan, algorithm = chosen
            plan.run(algorithm, x, weight, total)

    def tune(self, jobs: Iterable[Job], report: Callable[[str], None]) -> None:
        """Searches for what the file does not know yet, and adds it there; who comes meanwhile waits for it."""
        if self._make_plan is _no_library:
            return
        kinds = {problem: job.weights for job in jobs for problem in job.problems()}
        if self._file is None:
            self._search_all(kinds, report)
            return
        self._choices = _read(self._file)  # which is replaced as a whole, so that reading needs no lock
        if all(str(problem) in self._choices for problem in kinds):
            self._chosen.clear()
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            report("waiting for others that choose matrix products")
            with locked(self._file.with_suffix(".lock"), timeout_s=_TIMEOUT_S):
                self._choices = _read(self._file)
                self._search_all(kinds, report)
                _replace(self._file, msgspec.json.encode(self._choices))
        except (OSError, LaunchError) as error:
            log.warning("the choice of matrix products is not kept: %s", error)
            self._search_all(kinds, report)

    def _search_all(self, kinds: dict[Problem, Sequence[torch.Tensor]], report: Callable[[str], None]) -> None:
        """Adds the choices that are missing."""
        missing = [problem for problem in kinds if str(problem) not in self._choices]
        for number, problem in enumerate(missing, 1):
            report(f"choosing matrix products: {number} of {len(missing)}")
            found = self._search(problem, kinds[problem])
            self._choices[str(problem)] = None if found is None else found.tolist()
        self._chosen.clear()

    def _choice(self, problem: Problem) -> tuple[Plan, Algorithm] | None:
        if problem not in self._chosen:
            if len(self._chosen) >= _MOST_KEPT:
                self._chosen.clear()
            self._chosen[problem] = self._look_up(problem)
        return self._chosen[problem]

    def _look_up(self, problem: Problem) -> tuple[Plan, Algorithm] | None:
        words = self._choices.get(str(problem.searched))
        plan = self._make_plan(problem) if words is not None else None
        if words is None or plan is None:
            return None
        algorithm = np.array(words, np.uint64)
        return (plan, algorithm) if plan.can_use(algorithm) else None

    def _search(self, problem: Problem, weights: Sequence[torch.Tensor]) -> Algorithm | None:
        plan = self._make_plan(problem)
        if plan is None:
            return None
        used = weights[: max(_FEWEST_WEIGHTS, min(_MOST_WEIGHTS, _COLD_BYTES // weights[0].nbytes))]
        x = torch.randn((problem.rows, problem.inputs), dtype=problem.dtype, device=used[0].device)
        out = torch.zeros((problem.rows, problem.outputs), dtype=problem.dtype, device=used[0].device)

        def by_torch() -> None:
            for weight in used:
                _ = out.addmm_(x, weight.t()) if problem.is_added else torch.mm(x, weight.t(), out=out)

        def by(algorithm: Algorithm) -> None:
            for weight in used:
                plan.run(algorithm, x, weight, out)

        best, best_s = None, self._measure(by_torch) * _WORTH
        for algorithm in plan.guesses():
            took_s = self._measure(partial(by, algorithm))
            if took_s < best_s:
                best, best_s = algorithm, took_s
        return best


def gpu_seconds(run: Callable[[], object]) -> float:
    """The median of some rounds, launched one behind the other."""
    events: list[torch.cuda.Event] = [torch.cuda.Event(enable_timing=True) for _ in range(_ROUNDS + 1)]  # type: ignore[no-untyped-call]
    run()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    times = [start.elapsed_time(stop) for start, stop in pairwise(events)]
    return float(statistics.median(times)) / 1e3


def _read(file: Path) -> _Choices:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Choices)
    except OSError:
        return {}
    except msgspec.DecodeError as error:
        log.warning("%s is ignored: %s", file, error)
        return {}


def _replace(file: Path, content: bytes) -> None:
    """Writes a file that readers find whole."""
    written = file.with_suffix(".new")
    written.write_bytes(content)
    written.replace(file)


def make_products(device: torch.device) -> Products:
    """Those of a GPU: cuBLASLt's, if there is nvmath-python."""
    if find_spec("nvmath") is None:
        log.info("nvmath-python is not installed (headrace[cuda]): matrix products are left to torch")
        return Products()
    try:
        from components.engine.cublaslt import CublasLt

        library, folder = CublasLt(device), cache_root() / "products"
    except Exception as error:  # an older nvmath, or no cuBLASLt that it finds: products are right without it
        log.warning("matrix products are left to torch: %s", str(error).partition("\n")[0])
        return Products()
    name = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name(device))
    return Products(library.plan, folder / f"{name}-{library.version}.json")
