"""Accepts a drafted token that is likely enough for the target, relative to the draft distribution or by rank.

A child x is accepted if T(x) is at least `tolerance` times D(x) (so always if the draft does not overrate it), or
if x is among the target's `top_k` most likely tokens, or in the smallest set of most likely tokens with mass `top_p`.
There are no coins; the deepest accepted branch is written, and the bonus is the target token after it.

Source: soft matching, as surveys of assisted generation describe it; no paper's exact rule.
LOSSY: the distribution differs from the model's. Options: a token replaces the model's own choice if the
model gives it at least `tolerance` times the drafter's probability (1: only tokens that the drafter does not overrate;
0.1: up to ten times overrated), or ranks it within `top_k` or `top_p` (0: off). If a tree has no
draft distributions D(x) is 1, so `tolerance` is the minimum probability. At temperature 0 the distribution is one-hot,
and the text greedy decoding's. Costs a pass over the vocabulary for every node. Takes all draws.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import RandomSource, Verifier, verdict_at_deepest


@final
class Soft(Verifier):
    """Descends to the deepest node whose whole path is likely enough for the target."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """The thresholds of acceptance.

        Attributes:
            tolerance: minimum T(x) / D(x), above 0, at most 1; 1 is the strictest.
            top_k: ranks that are accepted at any ratio; 0 for none.
            top_p: mass of the most likely tokens that are accepted at any ratio; 0 for none, below 1.
        """

        tolerance: float = 0.3
        top_k: int = 0
        top_p: float = 0.0

        def __post_init__(self) -> None:
            if not 0 < self.tolerance <= 1:
                raise ValueError(f"tolerance must be above 0 and at most 1, got {self.tolerance}")
            if self.top_k < 0:
                raise ValueError(f"top_k must be 0 or more, got {self.top_k}")
            if not 0 <= self.top_p < 1:
                raise ValueError(f"top_p must be from 0 to below 1, got {self.top_p}")

    accepts: ClassVar[frozenset[Draw]] = frozenset(Draw)
    lossless: ClassVar[bool] = False
    wants_distributions: ClassVar[bool] = True

    def verify(self, tree: TokenTree, distributions: NodeDistributions, random: RandomSource) -> Verdict:

        @functools.cache
        def distribution_at(row: int) -> Tensor:
            return distributions.probs(slice(row, row + 1))[0]

        def is_likely(node: int) -> bool:
            token = tree.tokens[node]
            distribution = distribution_at(tree.parents[node] + 1)
            probability = distribution[token].item()
            if probability == 0:  # forbidden by a filter, or not the greedy choice
                return False
            share = 1.0 if tree.distributions is None else tree.distributions[node, token].item()
            if probability >= self.config.tolerance * share:
                return True
            if self.config.top_k == 0 and self.config.top_p == 0:
                return False
            likelier = distribution[distribution > probability]
            return len(likelier) < self.config.top_k or likelier.sum().item() < self.config.top_p

        return verdict_at_deepest(tree, distributions.picks(), is_likely)
