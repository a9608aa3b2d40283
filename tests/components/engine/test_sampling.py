"""Sampling: the right distribution, and the same token whatever the batch."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.engine.runner import SampleRow
from components.engine.sampling import changed_rows, sample
from components.messages import Sampling


def make_row(
    *,
    row: int = 0,
    position: int = 5,
    prompt: Any = (),
    output: Any = (),
    banned: tuple[int, ...] = (),
    **sampling: Any,
) -> SampleRow:
    ids = [np.array(tokens, np.int32) for tokens in (prompt, output)]
    return SampleRow(row, Sampling(**sampling), position, ids[0], ids[1], banned)


def make_logits(rows: int, vocab_size: int = 300, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def choose(logits: torch.Tensor, row: SampleRow) -> int:
    return int(sample(logits[None], [row]).tokens[0])


def draws(logits: torch.Tensor, count: int, **sampling: Any) -> np.ndarray:
    """Choices of `count` seeds from one row of logits, as counts per token."""
    rows = [make_row(seed=seed, **sampling) for seed in range(count)]
    tokens = sample(logits.expand(count, -1), rows).tokens
    return np.bincount(tokens, minlength=logits.shape[-1])


def chi_square_per_freedom(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Near 1 for draws from `probabilities`; places with few expected draws are put together."""
    expected = probabilities * counts.sum()
    often = expected >= 10
    got = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    used = wanted > 0
    return float((((got - wanted)[used] ** 2) / wanted[used]).sum() / max(1, used.sum() - 1))


@pytest.mark.parametrize("vocab_size", [5, 64, 65, 300])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(vocab_size: int, temperature: float) -> None:
    logits = make_logits(1, vocab_size)[0]
    counts = draws(logits, 20_000, temperature=temperature)
    assert chi_square_per_freedom(counts, torch.softmax(logits / temperature, -1).numpy()) < 1.6


def test_draws_at_successive_positions_follow_the_softmax() -> None:
    logits = make_logits(1, 100)[0]
    rows = [make_row(seed=7, position=position) for position in range(20_000)]
    counts = np.bincount(sample(logits.expand(len(rows), -1), rows).tokens, minlength=100)
    assert chi_square_per_freedom(counts, torch.softmax(logits, -1).numpy()) < 1.6


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8},
        {"min_p": 0.02, "top_k": 9, "top_p": 0.9},
    ],
)
def test_cuts_keep_the_right_tokens_in_proportion(cut: dict[str, Any]) -> None:
    logits = make_logits(1)[0]
    p = torch.softmax(logits, -1).double().numpy()
    p[p < cut.get("min_p", 0) * p.max()] = 0
    order = np.argsort(-p)
    p[order[cut.get("top_k", len(p)) :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= cut.get("top_p", 1.0)]] = 0
    p /= p.sum()
    counts = draws(logits, 10_000, **cut)
    assert counts[p == 0].sum() == 0
    assert chi_square_per_freedom(counts, p) < 1.8


def test_top_p_beyond_the_first_candidates() -> None:
    logits = torch.zeros(2_000)  # all alike: the nucleus is the whole vocabulary
    counts = draws(logits, 4_000, top_p=0.999)
    assert (counts > 0).sum() > 1_500


MIXED = [
    make_row(temperature=0.0),
    make_row(temperature=1.0, seed=1),
    make_row(temperature=0.7, seed=2, top_p=0.9),
    make_row(temperature=1.3, seed=2**64 - 1, top_k=5, position=77),
    make_row(temperature=1.0, seed=4, min_p=0.05, presence_penalty=1.0, output=[3, 4, 4]),
    make_row(temperature=1.0, seed=5, logit_bias=((9, 3.0),), banned=(1, 2), logprobs=2),
]


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(len(MIXED))), st.integers(1, len(MIXED)))
def test_a_choice_does_not_depend_on_the_batch(order: list[int], size: int) -> None:
    logits = make_logits(len(MIXED), 1_000)
    alone = [choose(logits[i], MIXED[i]) for i in range(len(MIXED))]
    picked = order[:size]
    together = sample(logits[picked], [MIXED[i] for i in picked])
    assert together.tokens.tolist() == [alone[i] for i in picked]


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(4_096)
    tokens = {choose(logits, make_row(seed=s, position=p)) for s in range(8) for p in range(8)}
    assert len(tokens) > 56
    assert choose(logits, make_row(seed=3, position=9)) == choose(logits, make_row(seed=3, position=9))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1e-12},
        {"temperature": 1e-300},
        {"top_k": 1},
        {"top_p": 1e-12},
        {"top_p": 0.0},
        {"min_p": 1.0},
    ],
)
def test_extremes_choose_the_best(sampling: dict[str, Any]) -> None:
    logits = make_logits(1)[0]
    for seed in range(5):
        assert choose(logits, make_row(seed=seed, **sampling)) == int(logits.argmax())


def test_top_k_over_the_vocabulary_cuts_nothing() -> None:
    logits = make_logits(1)[0]
    assert [choose(logits, make_row(seed=s, top_k=10_000)) for s in range(50)] == [
        choose(logits, make_row(seed=s)) for s in range(50)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_banned_but_one(temperature: float) -> None:
    banned = tuple(token for token in range(300) if token != 17)
    for seed in range(5):
        row = make_row(seed=seed, temperature=temperature, banned=banned)
        assert choose(make_logits(1)[0], row) == 17


def test_logit_bias_forces_and_forbids() -> None:
    logits = make_logits(1)[0]
    assert choose(logits, make_row(temperature=0.0, logit_bias=((42, 100.0),))) == 42
    best = int(logits.argmax())
    assert choose(logits, make_row(temperature=0.0, logit_bias=((best, -100.0),))) != best


def test_penalties_lower_what_was_said() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0, 0.4])
    assert choose(logits, make_row(temperature=0.0, presence_penalty=1.0, output=[0])) == 1
    assert choose(logits, make_row(temperature=0.0, frequency_penalty=0.3, output=[0])) == 0
    assert choose(logits, make_row(temperature=0.0, frequency_penalty=0.3, output=[0, 0])) == 1
    assert choose(logits, make_row(temperature=0.0, presence_penalty=1.0, prompt=[0])) == 0  # counts output only
    assert choose(logits, make_row(temperature=0.0, repetition_penalty=2.0, prompt=[0])) == 1  # counts both
    assert choose(torch.tensor([-1.0, -1.5]), make_row(temperature=0.0, repetition_penalty=2.0, prompt=[0])) == 1


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = make_logits(2)
    rows = [make_row(temperature=0.3, seed=1, top_k=2, logit_bias=((5, 50.0),), logprobs=3), make_row(temperature=0.0)]
    sampled = sample(logits, rows)
    expected = torch.log_softmax(logits[0], -1)
    first, second = sampled.logprobs
    assert sampled.tokens[0] == 5
    assert second is None
    assert first is not None
    assert first.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert first.top_ids == tuple(expected.topk(3).indices.tolist())
    assert first.top_logprobs == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)


def test_no_top_logprobs_still_gives_the_chosen_one() -> None:
    first = sample(make_logits(1), [make_row(temperature=0.0, logprobs=0)]).logprobs[0]
    assert first is not None
    assert first.top_ids == ()
    assert first.logprob < 0


def test_the_logits_stay_untouched() -> None:
    logits = make_logits(2)
    before = logits.clone()
    sample(logits, [make_row(seed=1, banned=(3,), logit_bias=((1, 5.0),)), make_row(top_p=0.5)])
    assert torch.equal(logits, before)


def test_which_rows_are_changed() -> None:
    assert changed_rows([]) == []
    rows = [
        make_row(top_k=5, min_p=0.1),
        make_row(logit_bias=((1, 2.0),)),
        make_row(presence_penalty=0.1, temperature=0.0),
        make_row(frequency_penalty=-0.1),
        make_row(repetition_penalty=1.1),
        make_row(banned=(3,)),
        make_row(),
    ]
    assert changed_rows(rows) == [1, 2, 3, 4, 5]
    assert changed_rows([msgspec.structs.replace(row, is_plain=True) for row in rows]) == []
