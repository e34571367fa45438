"""The confidence of a head: the map, its file, its fit, and its errors."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from draftree.core.errors import ModelLoadError
from draftree.heads.calibration import CONFIDENCE, Calibration, read_calibration, write_calibration
from draftree.train.batches import collate
from draftree.train.evaluate import ConfidenceFit, JudgedStep, calibration_error
from train_samples import texts

CPU = torch.device("cpu")


def test_the_identity_keeps_shares() -> None:
    same = Calibration(((1.0, 0.0),), ((1.0, 0.0),))
    for share in (0.001, 0.3, 0.97):
        found = same.log_probability(math.log(share), 0, is_sampled=True)
        assert found == pytest.approx(math.log(share), rel=1e-9)
    assert same.log_probability(-math.inf, 0, is_sampled=False) == -math.inf
    assert -1e-5 < same.log_probability(0.0, 0, is_sampled=False) < 0
    assert math.isnan(same.log_probability(math.nan, 0, is_sampled=False))


def test_levels_and_kinds_of_text_have_their_own_map_and_the_last_level_is_for_deeper_ones() -> None:
    own = Calibration(((1.0, 0.0), (2.0, 1.0)), ((0.5, -1.0),))
    half = math.log(0.5)
    assert own.log_probability(half, 0, is_sampled=False) == pytest.approx(half)
    sure = math.log(1 / (1 + math.exp(-1)))
    assert own.log_probability(half, 1, is_sampled=False) == pytest.approx(sure)
    assert own.log_probability(half, 7, is_sampled=False) == pytest.approx(sure)
    assert own.log_probability(half, 7, is_sampled=True) == pytest.approx(math.log(1 / (1 + math.e)))


def test_a_file_holds_the_map(tmp_path: Path) -> None:
    assert read_calibration(tmp_path) is None
    own = Calibration(((1.5, 0.25), (2.0, -1.0)), ((0.5, 0.0),))
    write_calibration(own, tmp_path)
    assert read_calibration(tmp_path) == own
    assert [path.name for path in tmp_path.iterdir()] == [CONFIDENCE]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"format": 2}',
        '{"format": 1, "greedy": [], "sampled": [[1, 0]]}',
        '{"format": 1, "greedy": [[1]]}',
        '{"format": 1, "greedy": [[-1, 0]], "sampled": [[1, 0]]}',
        '{"format": 1, "greedy": [[1, NaN]], "sampled": [[1, 0]]}',
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIDENCE).write_text(text)
    with pytest.raises(ModelLoadError):
        read_calibration(tmp_path)


def judged(shares: torch.Tensor, rates: torch.Tensor, room: torch.Tensor, generator: torch.Generator) -> JudgedStep:
    """One candidate with these shares, which matches with these rates."""
    match = torch.where(torch.rand(len(rates), generator=generator) < rates, 0, -1)
    return JudgedStep(room, match, shares.log()[:, None], torch.ones(len(rates), dtype=torch.bool))


def test_the_fit_finds_the_rates_of_shares_that_are_too_sure() -> None:
    generator = torch.Generator().manual_seed(3)
    fit = ConfidenceFit(2)
    for seed in range(3):
        batch = collate(texts(120, 0.0 if seed else 0.8, seed=seed), device=CPU, dtype=torch.float32)
        shares = 0.02 + 0.96 * torch.rand(batch.num_chains, generator=generator)
        rates = (0.5 * shares.logit() - 1).sigmoid()
        steps = [judged(shares, rates, batch.room > step, generator) for step in range(2)]
        fit.add(batch, steps)
    found = fit.fit()
    for pairs in (found.greedy, found.sampled):
        for slope, offset in pairs:
            assert slope == pytest.approx(0.5, abs=0.1)
            assert offset == pytest.approx(-1.0, abs=0.2)
    report = fit.report(found)
    for levels in report.values():
        for level in levels:
            assert level["mapped"] < 0.5 * level["raw"]


def test_levels_that_are_hardly_reached_take_the_map_before() -> None:
    generator = torch.Generator().manual_seed(4)
    fit = ConfidenceFit(2)
    batch = collate(texts(40), device=CPU, dtype=torch.float32)
    shares = torch.full((batch.num_chains,), 0.5) + 0.4 * torch.rand(batch.num_chains, generator=generator)
    never = torch.zeros(batch.num_chains)
    fit.add(
        batch, [judged(shares, never, batch.room > 0, generator), judged(shares, never + 1, batch.room > 1, generator)]
    )
    found = fit.fit()
    assert found.greedy[1] == found.greedy[0] != (1.0, 0.0)
    assert found.sampled == ((1.0, 0.0), (1.0, 0.0))
    assert found.log_probability(math.log(0.7), 0, is_sampled=False) < math.log(0.1)


def test_the_calibration_error_is_the_mean_distance() -> None:
    probabilities = torch.full((100,), 0.8, dtype=torch.float64)
    matches = torch.ones(100, dtype=torch.float64)
    assert calibration_error(probabilities, matches) == pytest.approx(0.2)
    assert calibration_error(matches, matches) == 0
