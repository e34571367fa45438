"""Accepts the target tokens as `coupled` does, with noise that the drafter does not share.

The target samples its own token at every node, and a child is accepted if it is that token: the drafter only needs to
guess. The walk and the text are those of `coupled`; only the drafter ranks its candidates without
the request's noise (at temperature 0 the two are one rule).

Source: naive sampling in SpecInfer, arXiv 2305.09781; the usual rule for drafters without
probabilities. Lossless, and drafter-invariant. Costs nothing beyond the target tokens. A drawn child is accepted with
probability sum(T * D), at most as often as by `coupled` or any rule with ratios: a baseline, and for
drafters that must not use the noise.
"""

from __future__ import annotations

from typing import ClassVar, final

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import RandomSource, Verifier, follow_picks


@final
class Match(Verifier):
    """Descends while the pick is a child; independent of draft distributions, hence takes all draws."""

    accepts: ClassVar[frozenset[Draw]] = frozenset(Draw)
    follows_picks: ClassVar[bool] = True

    def verify(self, tree: TokenTree, distributions: NodeDistributions, random: RandomSource) -> Verdict:
        return follow_picks(tree, distributions)
