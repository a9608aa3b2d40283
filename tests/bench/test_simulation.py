"""The simulator: traces as they are published, a clock that repeats itself, and what the policies must keep to."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from bench_sim import hit_rate, percentile
from simulated_worker import Speed
from simulation import Fate, Simulation, bound
from traces import BLOCK_TOKENS, GENERATORS, Request, documents, read_trace, unique, write_trace

from components.router import RouterOptions

SPEED = Speed(num_blocks=400)


def simulate(trace: list[Request], policy: str, **options: object) -> list[Fate]:
    """Four workers."""
    return Simulation(RouterOptions(policy=policy, **options), num_workers=4, speed=SPEED).run(trace)  # type: ignore[arg-type]


def ttfts(fates: list[Fate]) -> list[float]:
    return [fate.ttft_s for fate in fates if fate.ttft_s is not None]


@pytest.mark.parametrize("kind", GENERATORS)
def test_generated_traces_survive_a_file_in_the_published_format(kind: str, tmp_path: Path) -> None:
    trace = GENERATORS[kind](50, seed=3)
    write_trace(tmp_path / "trace.jsonl", trace)
    assert read_trace(tmp_path / "trace.jsonl") == trace
    assert trace == GENERATORS[kind](50, seed=3)
    assert all(len(request.hash_ids) == -(-request.input_length // BLOCK_TOKENS) for request in trace)


def test_a_published_line_is_read_with_its_full_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 27000, "input_length": 1030, "output_length": 9, "hash_ids": [46, 47, 99]}\n')
    [request] = read_trace(path)
    assert len(request.hashes) == 2 * 16


@pytest.mark.parametrize("line", ["{}", '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}'])
def test_a_line_that_does_not_fit_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n" + line)
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)


def test_conversations_grow_along_their_own_prefix() -> None:
    trace = GENERATORS["conversations"](200, seed=1)
    known: set[int] = set()
    shared = 0
    for request in trace:
        hits = [id in known for id in request.hash_ids]
        assert all(first >= second for first, second in pairwise(hits))  # a hit never follows a miss
        shared += sum(hits)
        known.update(request.hash_ids)
    assert shared > 0


def test_the_same_trace_always_has_the_same_fate() -> None:
    trace = documents(60, seed=2, rate_per_s=5)
    assert simulate(trace, "kv") == simulate(trace, "kv")


def test_every_request_is_answered_once_and_within_the_bound() -> None:
    trace = documents(80, seed=2, rate_per_s=4, num_documents=20)
    fates = simulate(trace, "kv")
    best = bound(trace, SPEED)
    assert len(fates) == len(trace)
    assert all(fate.e2e_s is not None for fate in fates)
    assert hit_rate(fates) <= hit_rate(best)
    assert percentile(ttfts(fates), 0.5) >= percentile(ttfts(best), 0.5)


def test_kv_finds_what_others_compute_again() -> None:
    trace = documents(120, seed=2, rate_per_s=3, num_documents=24)
    kv, busy = simulate(trace, "kv"), simulate(trace, "least_busy")
    assert hit_rate(kv) > hit_rate(busy) + 0.1
    assert hit_rate(kv) > hit_rate(bound(trace, SPEED)) - 0.1
    assert percentile(ttfts(kv), 0.5) < percentile(ttfts(busy), 0.5)


def test_kv_is_never_worse_than_least_busy_without_shared_prefixes() -> None:
    trace = unique(150, seed=4, rate_per_s=3)
    kv, busy = simulate(trace, "kv"), simulate(trace, "least_busy")
    for share in (0.5, 0.99):
        assert percentile(ttfts(kv), share) <= 1.02 * percentile(ttfts(busy), share)


def test_predictions_hold_in_the_simulator() -> None:
    fates = simulate(documents(80, seed=5, rate_per_s=4, num_documents=10), "kv")
    wrong = [fate for fate in fates if abs(fate.predicted_tokens - fate.cached_tokens) > BLOCK_TOKENS]
    assert len(wrong) <= 0.05 * len(fates)


def test_what_no_worker_has_room_for_is_shed() -> None:
    fates = simulate(unique(60, seed=1, rate_per_s=50), "kv", max_worker_requests=2, max_waiting=4, max_wait_s=1.0)
    shed = [fate for fate in fates if fate.e2e_s is None]
    assert 0 < len(shed) < len(fates)
