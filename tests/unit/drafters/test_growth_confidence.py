"""Calibrated scores of drafted trees: the planner's estimates change, the drafted tokens do not."""

from __future__ import annotations

import math

import pytest

from draftree import SamplingParams
from draftree.core.tree import Draw, depths
from draftree.core.types import Budget
from draftree.drafters.base import SequenceView
from draftree.drafters.growing.readers import SameReader
from draftree.drafters.growing.shapes import parse_shape
from draftree.drafters.growing.stepping import ModelStepper
from draftree.drafters.growing.tree_growth import Growth
from draftree.heads.calibration import Calibration
from draftree.models.table import TableLM, hashed
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History

VOCAB = 12
OWN = Calibration(((0.5, -0.3), (0.7, 0.2)), ((0.4, 0.1), (0.9, -0.5)))


def grown(
    calibration: Calibration | None,
    *,
    shape: str = "chain",
    temperature: float = 0.0,
    budget: Budget | None = None,
    shares_noise: bool = True,
    draw: Draw = Draw.FREE,
):  # type: ignore[no-untyped-def]
    stepper = ModelStepper(TableLM(hashed(VOCAB, seed=2)), SameReader(VOCAB, VOCAB))
    own = Growth(stepper, shape=parse_shape(shape, None), draw=draw, shares_noise=shares_noise, calibration=calibration)
    controls = build_controls(SamplingParams(temperature=temperature), vocab_size=VOCAB, seed=1)
    state = own.open(SequenceView(History([3, 4]), controls))
    (tree,) = own.grow([state], [Budget(6, 4) if budget is None else budget])
    return tree


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", ["chain", "2-2-1"])
def test_scores_are_sums_of_mapped_scores(shape: str, temperature: float) -> None:
    raw, mapped = (grown(one, shape=shape, temperature=temperature) for one in (None, OWN))
    assert (raw.tokens, raw.parents) == (mapped.tokens, mapped.parents)
    for node, parent in enumerate(raw.parents):
        level, place = 0, parent
        while place >= 0:
            level, place = level + 1, raw.parents[place]
        share = raw.scores[node] - (raw.scores[parent] if parent >= 0 else 0.0)
        before = mapped.scores[parent] if parent >= 0 else 0.0
        wanted = OWN.log_probability(share, level, is_sampled=temperature > 0)
        assert mapped.scores[node] - before == pytest.approx(wanted, abs=1e-9)


def test_a_minimum_confidence_is_compared_with_the_mapped_probability() -> None:
    """A map that is never sure ends the chain after its first node."""
    unsure = Calibration(((0.01, -3.0),), ((0.01, -3.0),))
    budget = Budget(4, 4, min_confidence=0.2)
    assert len(grown(unsure, budget=budget)) == 1
    sure = Calibration(((0.01, 3.0),), ((0.01, 3.0),))
    assert len(grown(sure, budget=budget)) == 4


STEADY = Calibration(((0.0001, 1.0),), ((0.0001, 1.0),))
"""Every node has a probability of 0.73."""


@pytest.mark.parametrize("shape", ["chain", "2-1-1-1"])
@pytest.mark.parametrize(("least", "depth"), [(0.0, 4), (0.3, 4), (0.45, 3), (0.6, 2), (0.8, 1)])
def test_nodes_below_a_minimum_survival_have_no_children(shape: str, least: float, depth: int) -> None:
    tree = grown(STEADY, shape=shape, budget=Budget(30, 4, min_survival=least))
    assert max(depths(tree.parents)) == depth


def test_scores_that_are_not_calibrated_are_not_compared_with_a_minimum_survival() -> None:
    assert len(grown(None, budget=Budget(4, 4, min_survival=0.9))) == 4
    assert len(grown(STEADY, budget=Budget(4, 4, min_survival=0.9), shares_noise=False)) == 4


def test_draws_that_are_inspected_keep_their_scores() -> None:
    raw, mapped = (grown(one, shape="wor-2-1", temperature=0.8, draw=Draw.WITHOUT_REPLACEMENT) for one in (None, OWN))
    assert raw.scores == mapped.scores
    raw, mapped = (grown(one, temperature=0.8, shares_noise=False) for one in (None, OWN))
    assert raw.scores == mapped.scores


def test_the_best_nodes_are_those_of_the_mapped_scores() -> None:
    found = grown(OWN, shape="best-5")
    assert len(found) == 5
    assert all(math.isfinite(score) for score in found.scores)
    for node, parent in enumerate(found.parents):
        assert parent < 0 or found.scores[node] < found.scores[parent]
