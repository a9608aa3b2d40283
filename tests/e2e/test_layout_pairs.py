"""KV between unequal workers, over real NIXL: right tokens, and as many pieces as the planner promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from completions import complete
from faults import RESTART_S, SHM, faulty, make_question, wait_for
from harness import serving
from prompts import Prompt, text_ids
from reference import Expected

from components.engine.fake import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS

FAKE_SLOT_BYTES = NUM_KV_HEADS * NUM_LAYERS * 2 * HEAD_DIM * 4
ROWS = NUM_KV_HEADS * NUM_LAYERS * 2


def runs(num_tokens: int, sizes: tuple[int, int]) -> int:
    """Pieces of one READ of a whole prompt at most: equal blocks go whole, others by run, head, layer, K or V."""
    count = -(-num_tokens // min(sizes))
    return count if sizes[0] == sizes[1] else count * ROWS


@pytest.mark.parametrize("sizes", [(16, 16), (64, 16), (16, 64)], ids=lambda sizes: f"{sizes[0]}to{sizes[1]}")
def test_block_sizes(tmp_path: Path, sizes: tuple[int, int]) -> None:
    with faulty(tmp_path, SHM, prefill__block_size=sizes[0], decode__block_size=sizes[1]) as graph:
        for length in (17, 64, 65, 200, 300):
            question = make_question(7, length)
            reply = graph.ask(question)

            assert reply.outcome == "right", reply
            assert reply.timing["mode"] == "remote"
            assert 0 < reply.timing["descriptors"] <= runs(length, sizes)
            if sizes[0] == sizes[1]:
                assert reply.timing["descriptors"] == reply.timing["blocks_moved"] == runs(length, sizes)
            else:
                assert reply.timing["bytes_moved"] == length * FAKE_SLOT_BYTES
        graph.assert_clean()


PAIRS = {(1, 1): 1, (2, 1): 2, (1, 2): 2, (2, 2): 2}
"""Pairs of ranks that share heads, for (prefill, decode) ranks of the default model's 3 KV heads."""


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("degrees", PAIRS, ids=lambda degrees: f"tp{degrees[0]}to{degrees[1]}")
def test_tensor_parallel_degrees(
    log: Path,
    degrees: tuple[int, int],
    few_prompts: list[Prompt],
    expect: Callable[[list[Prompt]], dict[str, Expected]],
) -> None:
    sets: dict[str, object] = {"prefill.tp": degrees[0], "decode.tp": degrees[1]}
    sets |= {"prefill.dtype": "float32", "decode.dtype": "float32"}
    with serving("graph/disagg.py", log=log, sets=sets) as graph:
        expected = expect(few_prompts)
        answers = complete(graph.url, few_prompts)
        assert [why for name, answer in answers.items() if (why := expected[name].differs(answer.text))] == []
        counted = Prompt("counted", tuple(text_ids()[50:562]), 4)
        timing: dict[str, Any] | None = complete(graph.url, [counted], cache_salt="count")["counted"].headrace
        assert timing is not None
        assert timing["mode"] == "remote"
        assert timing["descriptors"] == timing["blocks_moved"] * PAIRS[degrees] == 32 * PAIRS[degrees]


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_rank_that_dies_ends_its_replica_which_comes_back(log: Path) -> None:
    sets: dict[str, object] = {"worker.tp": 2, "worker.num_blocks": 64}
    with serving("graph/agg.py", log=log, sets=sets) as graph:
        prompt = Prompt("p", tuple(text_ids()[:40]), 6)
        before = complete(graph.url, [prompt])["p"].text
        (pid,) = graph.pids("worker")
        ranks = [p for p in graph.family() if p.ppid() == pid]
        assert len(ranks) == 1

        ranks[0].kill()

        wait_for(lambda: graph.pids("worker") and pid not in graph.pids("worker"), RESTART_S)
        graph.wait_node("worker", RESTART_S)  # a request that comes earlier is told to come again
        assert complete(graph.url, [prompt])["p"].text == before
