"""Same tokens everywhere: agg and disagg against `transformers.generate` in fp32, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from completions import complete
from harness import serving
from prompts import Prompt, crowd
from reference import Expected

Reference = Callable[[list[Prompt]], dict[str, Expected]]
Note = Callable[[str, object], None]
WORKERS = {"graph/agg.py": ("worker",), "graph/disagg.py": ("prefill", "decode")}


class Cell(msgspec.Struct, frozen=True):
    """One way to cut the work."""

    file: str
    prefix_cache: bool
    chunk: int
    num_blocks: int | None = None

    def __str__(self) -> str:
        pool = f"-blocks{self.num_blocks}" if self.num_blocks else ""
        return f"{Path(self.file).stem}-cache{int(self.prefix_cache)}-chunk{self.chunk}{pool}"

    def sets(self) -> dict[str, object]:
        """The `--set` options of this cell."""
        options = {"dtype": "float32", "enable_prefix_caching": self.prefix_cache, "max_num_batched_tokens": self.chunk}
        if self.num_blocks:
            options["num_blocks"] = self.num_blocks
        return {f"{node}.{name}": value for node in WORKERS[self.file] for name, value in options.items()}


ALL_CELLS = [Cell(file, cache, chunk) for file in WORKERS for cache in (True, False) for chunk in (64, 2048)]
TINY_BLOCKS = {"graph/agg.py": 60, "graph/disagg.py": 24}  # decode gets the crowd one by one: fewer are there at once
TINY_POOLS = [Cell(file, cache, 64, blocks) for file, blocks in TINY_BLOCKS.items() for cache in (True, False)]
TEST_CELLS = [Cell("graph/agg.py", True, 64), Cell("graph/disagg.py", False, 2048)]


def compare(
    cell: Cell,
    prompts: list[Prompt],
    expected: dict[str, Expected],
    log: Path,
    note: Note,
    *,
    at_once: tuple[int, ...] = (1, 16),
) -> list[str]:
    """Serves the cell and sends all prompts, so many at a time; what differs, in words. Near ties are noted."""
    faults, near_ties = [], []
    with serving(cell.file, log=log, sets=cell.sets()) as graph:
        for num in at_once:
            for name, answer in complete(graph.url, prompts, at_once=num).items():
                why = expected[name].differs(answer.text)
                faults += [f"{cell} {name} at {num}: {why}"] if why else []
                near_ties += [f"{name} at {num}"] if not why and answer.text != expected[name].texts[-1] else []
                assert answer.usage["completion_tokens"] == len(expected[name].ids)
                assert answer.finish == "length"
        preemptions = graph.metric("headrace_preemptions_total")
        assert (preemptions > 0) == bool(cell.num_blocks), "only a pool that is too small preempts"
        assert graph.metric("headrace_kv_blocks_used") == 0
    note("answers", len(prompts) * len(at_once))
    note("left at a near tie", ", ".join(near_ties) or "none")
    note("preemptions", int(preemptions))
    return faults


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", TEST_CELLS, ids=str)
def test_greedy_equals_transformers(
    cell: Cell, few_prompts: list[Prompt], expect: Reference, log: Path, record_property: Note
) -> None:
    assert compare(cell, few_prompts, expect(few_prompts), log, record_property) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", [TINY_POOLS[2]], ids=str)
def test_preemption_changes_no_token(cell: Cell, expect: Reference, log: Path, record_property: Note) -> None:
    assert compare(cell, crowd(), expect(crowd()), log, record_property, at_once=(16,)) == []


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", TINY_POOLS, ids=str)
def test_preemption_changes_no_token_anywhere(cell: Cell, expect: Reference, log: Path, record_property: Note) -> None:
    assert compare(cell, crowd(), expect(crowd()), log, record_property, at_once=(16,)) == []


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("cell", ALL_CELLS, ids=str)
def test_greedy_equals_transformers_everywhere(
    cell: Cell, all_prompts: list[Prompt], expect: Reference, log: Path, record_property: Note
) -> None:
    assert len(all_prompts) >= 50
    assert compare(cell, all_prompts, expect(all_prompts), log, record_property) == []


@pytest.mark.timeout(300)
def test_seeded_text_depends_on_nothing_but_the_seed(few_prompts: list[Prompt], tmp_path: Path) -> None:
    sampled = {"temperature": 0.8, "top_p": 0.95, "seed": 1234}
    texts = []
    for file, nodes in WORKERS.items():
        sets = {f"{node}.dtype": "float32" for node in nodes}
        with serving(file, log=tmp_path / "serve.log", sets=sets) as graph:
            for at_once in (1, 16):
                answers = complete(graph.url, few_prompts[1:], at_once=at_once, **sampled)
                texts.append({name: answer.text for name, answer in answers.items()})
    assert all(other == texts[0] for other in texts[1:])
