"""Tries the children of a node one after another, drawn without replacement, against what the others left of T and D.

As in `multistep`, child x_i is kept with probability min(1, T(x_i)/D_i(x_i)), or T becomes norm((T - D_i)+). Here a
drawn token is also gone from the draft distribution: D_(i+1) is D_i with D_i(x_i) set to 0, renormalised, which is the
distribution that the next child was really drawn from. No draw repeats another, so a second child is never wasted.

Source: recursive speculative decoding, Jeon et al., arXiv 2402.14160, recursive rejection sampling; Sequoia, Chen et
al., arXiv 2402.12374. The k largest of log D + Gumbel noise, in order, are such draws.
Lossless in distribution; the text depends on what was drafted. Costs two passes over the vocabulary for every child
tried. Needs draw order: children sorted by probability are no draws. Takes draws without replacement whose siblings
carry one and the same distribution; point draws (any number, each its own distribution); and iid draws, which use
nothing up, so that D stays as it is: with one child a node the two are one distribution, with more this is `multistep`.
Loses to `coupled` from two children on where the drafter is good; to `traversal` by a little on deep trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import Verifier
from draftree.verifiers.common.chance import Chance
from draftree.verifiers.common.ratios import WITH_DISTRIBUTIONS, walk_siblings


@final
class Recursive(Verifier):
    """One coin a child; a drawn token leaves the draft distribution."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """Takes no options."""

    accepts: ClassVar[frozenset[Draw]] = WITH_DISTRIBUTIONS
    needs_distributions: ClassVar[bool] = True

    def verify(self, tree: TokenTree, distributions: NodeDistributions, chance: Chance) -> Verdict:
        """Walk down, children in draw order."""
        return walk_siblings(tree, distributions, chance)
