"""Verdicts by hand: the walk of `coupled` and `match`, and the probability of every verdict of ratio rules."""

from __future__ import annotations

import math

import pytest
import torch

from draftree.core.noise import Noise
from draftree.core.tree import ROOT, Draw, TokenTree, chain
from draftree.core.types import Verdict
from draftree.models.table import listed
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import NoiseSource, draft_distribution
from oracle import outcomes
from table_cases import Case, node_distributions, rule

Tokens = tuple[int, ...]


class Picks(NodeDistributions):
    """Distributions of which only the picks are known."""

    __slots__ = ("_listed",)

    def __init__(self, *listed: int) -> None:
        self._listed = list(listed)

    def picks(self) -> list[int]:
        return self._listed


@pytest.mark.parametrize("name", ["coupled", "match"])
@pytest.mark.parametrize(
    ("tokens", "parents", "picks", "verdict"),
    [
        ((), (), (7,), Verdict((), 7)),
        ((5, 6), (ROOT, 0), (7, 0, 0), Verdict((), 7)),
        ((5, 6), (ROOT, 0), (5, 8, 0), Verdict((0,), 8)),
        ((5, 6), (ROOT, 0), (5, 6, 9), Verdict((0, 1), 9)),
        # two branches: the second is the pick
        ((5, 6, 7, 8), (ROOT, ROOT, 0, 1), (6, 7, 8, 0, 3), Verdict((1, 3), 3)),
        # a match below a node that is none does not count
        ((5, 6), (ROOT, 0), (4, 6, 1), Verdict((), 4)),
        # twins: the one that goes deeper is kept
        ((5, 5, 6), (ROOT, ROOT, 1), (5, 6, 6, 2), Verdict((1, 2), 2)),
        # equal depth: the first drafted
        ((5, 5), (ROOT, ROOT), (5, 1, 2), Verdict((0,), 1)),
    ],
)
def test_walk(name: str, tokens: Tokens, parents: Tokens, picks: Tokens, verdict: Verdict) -> None:
    assert rule(name).verify(TokenTree(tokens, parents), Picks(*picks), NoiseSource(Noise(0))) == verdict


def test_only_coupled_lets_the_drafter_share_the_noise() -> None:
    assert [name for name in VERIFIERS.names() if VERIFIERS.find(name).shares_noise] == ["coupled"]


IID, WOR, POINT = Draw.IID, Draw.WITHOUT_REPLACEMENT, Draw.POINT
T = [0.5, 0.3, 0.2]
D = [0.2, 0.2, 0.6]
T2 = [0.1, 0.1, 0.8]
CASE = Case.of(listed({(0,): T}, otherwise=T2), listed({(0,): D}, otherwise=D))


def verdicts(name: str, tree: TokenTree) -> dict[tuple[tuple[int, ...], int], float]:
    verifier = rule(name)
    distributions = node_distributions(CASE, tree)
    found: dict[tuple[tuple[int, ...], int], float] = {}
    for verdict, probability in outcomes(lambda chance: verifier.verify(tree, distributions, chance)):
        key = (verdict.path, verdict.bonus)
        found[key] = found.get(key, 0.0) + probability
    return found


def distributions(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("name", ["token", "block", "multistep", "recursive", "traversal"])
def test_one_drawn_token(name: str) -> None:
    """Token 2 is overrated: kept with 0.2/0.6; else (T - D)+ = (0.3, 0.1, 0) over 0.4."""
    found = verdicts(name, chain([2], draw=IID, distributions=distributions(D)))
    expected = {((), 0): 2 / 3 * 0.75, ((), 1): 2 / 3 * 0.25}
    expected |= {((0,), token): T2[token] / 3 for token in range(3)}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", ["token", "block", "multistep", "recursive", "traversal"])
def test_one_certain_token(name: str) -> None:
    """A point draw is kept with T of it; else T without it."""
    found = verdicts(name, chain([2], draw=POINT))
    expected = {((), 0): 0.5, ((), 1): 0.3} | {((0,), token): 0.2 * T2[token] for token in range(3)}
    assert found == pytest.approx(expected)


def kept(found: dict[tuple[tuple[int, ...], int], float], path: tuple[int, ...]) -> float:
    return math.fsum(probability for (nodes, _), probability in found.items() if nodes == path)


def test_multistep_second_child_meets_the_residual() -> None:
    """After the first 2 is rejected T is (0.75, 0.25, 0): the second child, 1, is kept with 1, min(1, 0.25/0.2)."""
    found = verdicts("multistep", TokenTree((2, 1), (ROOT, ROOT), draw=IID, distributions=distributions(D, D)))
    assert kept(found, (0,)) == pytest.approx(1 / 3)
    assert kept(found, (1,)) == pytest.approx(2 / 3)


def test_multistep_twin_is_never_kept_but_counts() -> None:
    """The duplicate subtracts 0.2 each from 0.75 and 0.25: the residual is (0.55, 0.05) over 0.6."""
    found = verdicts("multistep", TokenTree((2, 2), (ROOT, ROOT), draw=IID, distributions=distributions(D, D)))
    assert kept(found, (1,)) == 0
    assert found[((), 1)] == pytest.approx(2 / 3 * 0.05 / 0.6)


def test_recursive_second_child_has_the_residual_distribution() -> None:
    """D without 2 is (0.5, 0.5, 0): child 1 is kept with 0.25/0.5, and if not the bonus is 0."""
    found = verdicts("recursive", TokenTree((2, 1), (ROOT, ROOT), draw=WOR, distributions=distributions(D, D)))
    assert kept(found, (0,)) == pytest.approx(1 / 3)
    assert kept(found, (1,)) == pytest.approx(2 / 3 * 0.5)
    assert found[((), 0)] == pytest.approx(2 / 3 * 0.5)
    assert ((), 1) not in found


@pytest.mark.parametrize("name", ["block", "traversal"])
def test_block_lends_the_surplus_of_a_later_token(name: str) -> None:
    """w = 1/3, then min(1, 1/3 * 0.8/0.6) = 4/9; S_1 = 0, since T2/3 is below D: the first token is rejected alone.

    So the chain is kept with 4/9, more than token's 1/3; otherwise the head of one with 0, and nothing with 5/9.
    """
    tree = chain([2, 2], draw=IID, distributions=distributions(D, D))
    found = verdicts(name, tree)
    assert kept(found, (0, 1)) == pytest.approx(4 / 9)
    assert kept(found, (0,)) == 0
    assert kept(found, ()) == pytest.approx(5 / 9)
    assert found[((), 0)] == pytest.approx(5 / 9 * 0.75)
    assert kept(verdicts("token", tree), (0, 1)) == pytest.approx(1 / 3)


def test_block_stops_at_a_head_with_its_own_coin() -> None:
    """0 is kept for sure (w = 1), then 1 with w = 0.1/0.2; h_1 = S/(S + 0) = 1 with S = 0.8 - 0.6."""
    found = verdicts("block", chain([0, 1], draw=IID, distributions=distributions(D, D)))
    assert kept(found, (0, 1)) == pytest.approx(0.5)
    assert kept(found, (0,)) == pytest.approx(0.5)
    assert found[((0,), 2)] == pytest.approx(0.5)


def test_a_token_without_a_distribution_counts_as_certain() -> None:
    tree = TokenTree((1,), (ROOT,), draw=IID, distributions=distributions([1.0, 0.0, 0.0]))
    assert draft_distribution(tree, 0, vocab_size=3).tolist() == [0.0, 1.0, 0.0]
