"""`soft` and `typical`: their thresholds, by hand, and that they change the distribution."""

from __future__ import annotations

import math

import pytest
import torch

from draftree.core.errors import ConfigurationError
from draftree.core.noise import Noise
from draftree.core.registry import Spec
from draftree.core.tree import ROOT, Draw, TokenTree, chain
from draftree.core.types import Verdict
from draftree.models.table import hashed, listed, near
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import NoiseSource
from oracle import ChancePicks, ScriptedChance, trees, written
from table_cases import Case, controls, joint, node_distributions, rule, variation

T = [0.6, 0.25, 0.1, 0.05, 0.0]
CASE = Case.of(listed({(0,): T}, otherwise=[0.2] * 5), listed({(0,): T}, otherwise=[0.2] * 5))
ENTROPY = -sum(t * math.log(t) for t in T if t)


def keeps(name: str, token: int, *, draft: float | None = None, **options: object) -> bool:
    """Whether a single child is kept that the drafter gave this probability."""
    rows = None
    if draft is not None:
        rows = torch.full((1, 5), (1 - draft) / 4, dtype=torch.float64)
        rows[0, token] = draft
    tree = chain([token], draw=Draw.FREE if draft is None else Draw.IID, distributions=rows)
    verdict = rule(name, **options).verify(tree, node_distributions(CASE, tree), NoiseSource(Noise(0)))
    return verdict.path == (0,)


@pytest.mark.parametrize(
    ("token", "draft", "tolerance", "answer"),
    [
        (2, 0.05, 1.0, True),  # not overrated
        (2, 0.2, 1.0, False),  # overrated twice
        (2, 0.2, 0.5, True),
        (2, 0.2, 0.51, False),
        (4, 0.0, 0.01, False),  # the target forbids it, for every draft
        (1, None, 0.249, True),  # without distributions the draft counts as certain
        (1, None, 0.26, False),
    ],
)
def test_soft_tolerance(token: int, draft: float | None, tolerance: float, answer: bool) -> None:
    assert keeps("soft", token, draft=draft, tolerance=tolerance) is answer


@pytest.mark.parametrize(
    ("token", "options", "answer"),
    [
        (2, {"top_k": 3}, True),
        (2, {"top_k": 2}, False),
        (4, {"top_k": 5}, False),
        (1, {"top_p": 0.61}, True),
        (1, {"top_p": 0.59}, False),
        (2, {"top_p": 0.86}, True),
        (2, {"top_p": 0.84}, False),
    ],
)
def test_soft_ranks(token: int, options: dict[str, float], answer: bool) -> None:
    assert keeps("soft", token, tolerance=1.0, **options) is answer


@pytest.mark.parametrize(
    ("token", "epsilon", "delta", "answer"),
    [
        (2, 0.1, 1.0, True),
        (3, 0.1, 1.0, False),
        (3, 1.0, 0.0499 / math.exp(-ENTROPY), True),
        (3, 1.0, 0.0501 / math.exp(-ENTROPY), False),
        (4, 1e-9, 1e-9, False),
    ],
)
def test_typical_threshold(token: int, epsilon: float, delta: float, answer: bool) -> None:
    assert keeps("typical", token, epsilon=epsilon, delta=delta) is answer


@pytest.mark.parametrize("name", ["soft", "typical"])
def test_the_deepest_branch_is_kept_and_the_pick_follows(name: str) -> None:
    tree = TokenTree((3, 0, 2, 4, 1), (ROOT, ROOT, 0, 2, 1))
    options = {"tolerance": 0.1} if name == "soft" else {"epsilon": 0.1, "delta": 1.0}
    for seed in range(5):
        distributions = node_distributions(CASE, tree, controls(5, seed=seed))
        verdict = rule(name, **options).verify(tree, distributions, NoiseSource(Noise(0)))
        assert verdict.path == (1, 4)  # the branch below 3 is deeper, but 3 is too unlikely
        assert verdict.bonus == distributions.picks()[5]


@pytest.mark.parametrize(
    ("name", "options", "distance"),
    [("soft", {}, 0.3680), ("soft", {"tolerance": 1.0}, 0.1372), ("typical", {}, 0.3846)],
)
def test_the_distribution_is_not_the_targets_and_the_rule_is_lossy(
    name: str, options: dict[str, float], distance: float
) -> None:
    target = hashed(4, 3)
    case = Case.of(target, near(target, 4, distance=1.0))
    verifier = rule(name, **options)
    assert verifier.lossless is False

    def verify(tree: TokenTree, distributions: NodeDistributions, chance: ScriptedChance) -> Verdict:
        return verifier.verify(tree, ChancePicks(case, tree, chance), chance)

    result = written(case, trees(case, (1, 1), Draw.IID), verify, length=3)
    assert variation(result.distribution, joint(case, 3)) == pytest.approx(distance, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("soft", "tolerance", "0"),
        ("soft", "tolerance", "1.5"),
        ("soft", "tolerance", "nan"),
        ("soft", "top-k", "-1"),
        ("soft", "top-p", "1"),
        ("typical", "epsilon", "0"),
        ("typical", "delta", "2"),
    ],
)
def test_senseless_knobs_are_refused(name: str, option: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option.replace('-', '_')} must be"):
        VERIFIERS.configure(Spec(name, None, ((option, value),)))
