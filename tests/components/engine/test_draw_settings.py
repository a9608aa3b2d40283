"""What the sampling kernels are told of their rows."""

import numpy as np

from components.engine.draw_settings import COLUMNS, DrawSettings
from components.engine.runner import SampleRow
from components.engine.sampling import _key, _mix, _signed
from components.messages import Sampling

VOCAB = 1_000
GREEDY = Sampling(temperature=0.0)


def make_rows(*samplings: Sampling, position: int = 5) -> list[SampleRow]:
    empty = np.empty(0, np.int32)
    return [SampleRow(i, sampling, position + i, empty, empty) for i, sampling in enumerate(samplings)]


def make_settings(rows: list[SampleRow]) -> DrawSettings:
    return DrawSettings([row.sampling for row in rows], VOCAB)


def test_keys_are_those_of_the_cpu_sampler_at_each_position() -> None:
    samplings = (Sampling(seed=0), GREEDY, Sampling(seed=(1 << 64) - 1), Sampling(seed=-3))
    settings = make_settings(make_rows(*samplings))
    for position in (0, 1, 131_072):
        rows = make_rows(*samplings, position=position)
        drawn = [rows[0], rows[2], rows[3]]
        expected = [[_signed(_mix(_key(row) ^ stage)) for stage in (0, 1)] for row in drawn]
        assert settings.at(rows)[:, :2].tolist() == expected


def test_columns() -> None:
    rows = make_rows(GREEDY, Sampling(temperature=0.5, top_p=0.25, top_k=7, min_p=1.0), Sampling(top_k=VOCAB))
    settings = make_settings(rows).at(rows)
    assert settings.shape == (2, COLUMNS)
    assert settings[:, 2].tolist() == [7, VOCAB]
    assert settings[:, 3:6].copy().view(np.float64).tolist() == [[0.5, 0.25, 0.0], [1.0, 1.0, float("-inf")]]
    assert settings[:, 6].tolist() == [1, 2]


def test_a_floor_is_needed_only_for_top_k_and_top_p() -> None:
    assert not make_settings(make_rows(GREEDY, Sampling(min_p=0.1), Sampling(top_k=VOCAB))).is_cut
    assert make_settings(make_rows(GREEDY, Sampling(top_p=0.99))).is_cut
    assert make_settings(make_rows(Sampling(), Sampling(top_k=VOCAB - 1))).is_cut


def test_nothing_to_draw() -> None:
    rows = make_rows(GREEDY, Sampling(top_k=1))
    assert len(make_settings(rows)) == 0
    assert len(make_settings([])) == 0
