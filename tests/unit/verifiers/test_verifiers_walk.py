"""The walk of `coupled` and `match`, by hand."""

from __future__ import annotations

import pytest

from draftree.core.noise import Noise
from draftree.core.tree import ROOT, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import VERIFIERS
from draftree.verifiers.common.chance import NoiseChance
from table_cases import rule

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
    assert rule(name).verify(TokenTree(tokens, parents), Picks(*picks), NoiseChance(Noise(0))) == verdict


def test_only_coupled_lets_the_drafter_share_the_noise() -> None:
    assert [name for name in VERIFIERS.names() if VERIFIERS.find(name).shares_noise] == ["coupled"]
