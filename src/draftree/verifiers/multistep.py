"""Tries independently drawn children of a node in turn, each against the residual after the rejected ones.

Child x_i, drawn from D_i, is accepted with probability min(1, T(x_i)/D_i(x_i)); a rejection turns T into
norm((T - D_i)+), the part of the target that is not yet covered. After the last rejection the bonus is drawn from it.

Source: SpecInfer, arXiv 2305.09781, VerifyStochastic; their P(. | u, LLM) is our T, their
P(. | u, SSM_s) our D_i, which may differ from child to child.
Lossless in distribution; the text depends on the draft. Costs a pass over the vocabulary for every child tried.
Children must be in draw order, duplicates kept: a duplicate of a rejected child is never accepted itself, but its
subtraction from T is part of the rule. Takes iid and point draws; children drawn without replacement have another
distribution and need `recursive`, which accepts more: repeated independent draws are wasted, most at low temperature.
"""

from __future__ import annotations

from typing import ClassVar, final

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import RandomSource, Verifier, walk_siblings


@final
class Multistep(Verifier):
    """One coin per child; the draft distribution stays unchanged after a rejection."""

    accepts: ClassVar[frozenset[Draw]] = frozenset({Draw.IID, Draw.POINT})
    needs_distributions: ClassVar[bool] = True

    def verify(self, tree: TokenTree, distributions: NodeDistributions, random: RandomSource) -> Verdict:
        return walk_siblings(tree, distributions, random)
