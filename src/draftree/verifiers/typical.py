"""Accepts a drafted token that is typical of the target's distribution: likely, or likely relative to its entropy.

A child x is accepted if T(x) >= min(epsilon, delta * exp(-H(T))), H the entropy of the target's distribution at its
parent: at low entropy only the model's own choice passes, at high entropy many tokens do. The deepest accepted branch
is written, and the bonus is the target token after it.

Source: typical acceptance, Medusa, arXiv 2401.10774; epsilon and delta are theirs.
LOSSY: the distribution differs from the model's. Options: a token replaces the model's own choice if the
model gives it at least `epsilon`, or at least `delta` times the geometric mean of its distribution. Smaller is faster
and further from the model; with both at 1 a token must reach that mean. At temperature 0 the distribution is one-hot,
and the text greedy decoding's. Costs a pass over the vocabulary for every node. Takes all draws.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import RandomSource, Verifier, verdict_at_deepest


@final
class Typical(Verifier):
    """Descends to the deepest node whose whole path is typical."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """The thresholds of acceptance.

        Attributes:
            epsilon: a probability that always suffices, above 0, at most 1.
            delta: share of exp(-entropy) that suffices, above 0, at most 1.
        """

        epsilon: float = 0.09
        delta: float = 0.3

        def __post_init__(self) -> None:
            for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
                if not 0 < value <= 1:
                    raise ValueError(f"{name} must be above 0 and at most 1, got {value}")

    accepts: ClassVar[frozenset[Draw]] = frozenset(Draw)
    lossless: ClassVar[bool] = False

    def verify(self, tree: TokenTree, distributions: NodeDistributions, random: RandomSource) -> Verdict:

        @functools.cache
        def distribution_at(row: int) -> tuple[Tensor, float]:
            distribution = distributions.probs(slice(row, row + 1))[0]
            entropy = torch.special.entr(distribution).sum().item()
            return distribution, min(self.config.epsilon, self.config.delta * math.exp(-entropy))

        def is_typical(node: int) -> bool:
            distribution, least = distribution_at(tree.parents[node] + 1)
            return distribution[tree.tokens[node]].item() >= least

        return verdict_at_deepest(tree, distributions.picks(), is_typical)
