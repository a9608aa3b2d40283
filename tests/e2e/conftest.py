"""Fixtures of the end-to-end tests: the reference run, and logs that end up beside the test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import ServedGraph, start
from prompts import FEW, LENGTHS, Prompt, equality_prompts
from reference import Expected, greedy_reference


@pytest.fixture(scope="session", autouse=True)
def run_folder() -> Iterator[Path]:
    """A run folder of this session's own (short: socket paths are limited), apart from other graphs on the machine."""
    folder = Path(tempfile.mkdtemp(prefix="hr-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def few_prompts() -> list[Prompt]:
    """A representative handful."""
    return equality_prompts(FEW, num_shared=3, num_outputs=10)


@pytest.fixture(scope="session")
def all_prompts() -> list[Prompt]:
    """At least fifty, of 1 to 2,000 tokens."""
    return equality_prompts(LENGTHS)


@pytest.fixture(scope="session")
def expect() -> Callable[[list[Prompt]], dict[str, Expected]]:
    """The reference run of prompts, each computed once a session."""
    known: dict[Prompt, Expected] = {}

    def reference(prompts: list[Prompt]) -> dict[str, Expected]:
        fresh = [prompt for prompt in prompts if prompt not in known]
        known.update(zip(fresh, greedy_reference(fresh), strict=True))
        return {prompt.name: known[prompt] for prompt in prompts}

    return reference


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where the served graph's output goes."""
    return tmp_path / "serve.log"


@pytest.fixture
def started() -> Iterator[Callable[..., ServedGraph]]:
    """Starts graphs that the test ends in its own way; what is left of them at the end is killed."""
    graphs: list[ServedGraph] = []

    def begin(*args: object, **kwargs: object) -> ServedGraph:
        graphs.append(start(*args, **kwargs))
        return graphs[-1]

    yield begin
    for graph in graphs:
        graph.end()
