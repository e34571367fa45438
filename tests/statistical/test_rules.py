"""Rules with their real noise write Markov chains with the target's transitions: 15000 tokens for each rule.

Each rule is run as the loop runs it, round after round on its own text, with chances from a stream of the round.
The transitions are counted by context (four tokens, four distributions) and Pearson's statistic, 12 degrees of freedom,
is tested at level 1e-4: an honest rule fails once in 10000 choices of the seed, which is fixed. A chi-square distance
of 0.0057 a token (a total variation of about 0.04) is found with probability 0.99. The biased twins must be found.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from biased_rules import bonus_from_the_target
from draftree.core.noise import Noise
from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Verdict
from draftree.models.table import hashed, near
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import NoiseSource, RandomSource
from sampled_trees import chi_square
from table_cases import Case, rule

TARGET = hashed(4, seed=11)
CASE = Case.of(TARGET, near(TARGET, seed=12, distance=1.0), order=1)
T = torch.from_numpy(np.stack([CASE.target_distribution((token,)) for token in range(4)]))
D = torch.from_numpy(np.stack([CASE.draft_distribution((token,)) for token in range(4)]))
DISTRIBUTIONS = D.tolist()
LEVEL = 1e-4
Verify = Callable[[TokenTree, NodeDistributions, RandomSource], Verdict]


class MarkovDistributions(NodeDistributions):
    """Distributions of a tree's rows by the one token before each."""

    __slots__ = ("_before",)

    def __init__(self, tree: TokenTree, root: int) -> None:
        self._before = [root, *tree.tokens]

    def probs(self, rows: Sequence[int] | slice = slice(None)) -> Tensor:
        return T[self._before[rows]] if isinstance(rows, slice) else T[[self._before[row] for row in rows]]


def drawn(noise: Noise, node: int, distribution: Sequence[float], *, without: Sequence[int] = ()) -> int:
    """One token by the inverse of the cumulated distribution, with the uniform of a node."""
    weights = [0.0 if token in without else weight for token, weight in enumerate(distribution)]
    aim = noise.uniform(node) * sum(weights)
    return bisect.bisect_right(list(itertools.accumulate(weights)), aim)


def drafted(noise: Noise, root: int, shape: Sequence[int], draw: Draw, *, claimed: Draw) -> TokenTree:
    """A tree drawn from the draft distributions by a noise of its own."""
    tokens: list[int] = []
    parents: list[int] = []
    frontier = [(ROOT, root)]
    rows = []
    for count in shape:
        level: list[tuple[int, int]] = []
        for node, before in frontier:
            siblings: list[int] = []
            for _ in range(count):
                siblings.append(
                    drawn(noise, len(tokens), DISTRIBUTIONS[before], without=() if draw is Draw.IID else siblings)
                )
                level.append((len(tokens), siblings[-1]))
                tokens.append(siblings[-1])
                parents.append(node)
                rows.append(before)
        frontier = level
    return TokenTree(tuple(tokens), tuple(parents), draw=claimed, distributions=D[rows])


def p_value(verify: Verify, shape: Sequence[int], draw: Draw, *, tokens: int, claimed: Draw | None = None) -> float:
    """Writes a text and tests its transitions."""
    request = Noise(2024)
    text = [0]
    while len(text) <= tokens:
        tree = drafted(request.stream("draft", len(text)), text[-1], shape, draw, claimed=claimed or draw)
        chance = NoiseSource(request.stream("verify", len(text)))
        verdict = verify(tree, MarkovDistributions(tree, text[-1]), chance)
        text += [*(tree.tokens[node] for node in verdict.path), verdict.bonus]
    counts = np.zeros((4, 4))
    np.add.at(counts, (text[:-1], text[1:]), 1)
    return chi_square(counts, T.numpy())[1]


@pytest.mark.parametrize(
    ("name", "shape", "draw"),
    [
        ("token", (1, 1, 1), Draw.IID),
        ("block", (1, 1, 1), Draw.IID),
        ("multistep", (2, 2), Draw.IID),
        ("recursive", (2, 2), Draw.WITHOUT_REPLACEMENT),
        ("traversal", (2, 2), Draw.WITHOUT_REPLACEMENT),
    ],
)
def test_transitions_are_the_targets(name: str, shape: tuple[int, ...], draw: Draw) -> None:
    assert p_value(rule(name).verify, shape, draw, tokens=15_000) > LEVEL


def test_biased_variant_of_token_is_detected() -> None:
    assert p_value(bonus_from_the_target, (1, 1, 1), Draw.IID, tokens=6_000) < LEVEL


def test_biased_variant_of_multistep_is_detected() -> None:
    """Children drawn without replacement, called independent."""
    draw = Draw.WITHOUT_REPLACEMENT
    assert p_value(rule("multistep").verify, (2,), draw, tokens=6_000, claimed=Draw.IID) < LEVEL


def test_biased_variant_that_verifies_with_the_draft_noise_is_detected() -> None:
    """The same stream drafts and tosses: the first uniform chooses the first token and decides on it."""
    request = Noise(2024)
    counts = np.zeros(4)
    for place in range(4_000):
        stream = request.stream("draft", place)
        tree = drafted(stream, 0, (1,), Draw.IID, claimed=Draw.IID)
        verdict = rule("token").verify(tree, MarkovDistributions(tree, 0), NoiseSource(stream))
        counts[tree.tokens[0] if verdict.path else verdict.bonus] += 1
    assert chi_square(counts[None], T[:1].numpy())[1] < LEVEL
