"""Tries children drawn without replacement in turn, each against the residuals of T and D after the rejected ones.

As in `multistep`, child x_i is accepted with probability min(1, T(x_i)/D_i(x_i)), else T becomes norm((T - D_i)+). Here
a drawn token is also removed from the draft distribution: D_(i+1) is D_i with D_i(x_i) set to 0, renormalised, which is
the distribution that the next child was drawn from. No draw repeats another, so no child is wasted.

Source: recursive speculative decoding, Jeon et al., arXiv 2402.14160, recursive rejection sampling; Sequoia, Chen et
al., arXiv 2402.12374. The k largest of log D + Gumbel noise, in order, are such draws.
Lossless in distribution; the text depends on the draft. Costs two passes over the vocabulary for every child
tried. Needs draw order: children sorted by probability are not draws. Takes draws without replacement whose siblings
share one distribution; point draws (any number, each with its own distribution); and iid draws, which
remove nothing, so that D stays unchanged: with one child per node the two coincide, with more this is `multistep`.
Accepts less than `coupled` from two children on if the drafter is good, and slightly less than `traversal` on deep
trees.
"""

from __future__ import annotations

from typing import ClassVar, final

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import WITH_DISTRIBUTIONS, RandomSource, Verifier, walk_siblings


@final
class Recursive(Verifier):
    """One coin per child; a drawn token is removed from the draft distribution."""

    accepts: ClassVar[frozenset[Draw]] = WITH_DISTRIBUTIONS
    needs_distributions: ClassVar[bool] = True

    def verify(self, tree: TokenTree, distributions: NodeDistributions, random: RandomSource) -> Verdict:
        return walk_siblings(tree, distributions, random)
