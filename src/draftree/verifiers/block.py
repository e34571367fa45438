"""Accepts the longest prefix of a drafted chain that the joint distributions allow.

A token that the target prefers to the draft lends its surplus to the tokens after it: w_i = min(1,
w_(i-1) * T_i(x_i)/D_i(x_i)), w_0 = 1, is the probability that the prefix of length i may be accepted. The prefix of
length i is accepted if its own coin with probability h_i succeeds and the coin of no longer prefix does:
h_i = S_i / (S_i + 1 - w_i) with S_i = sum_x (w_i * T_(i+1)(x) - D_(i+1)(x))+, and h of the whole chain is its w. The
bonus is drawn from norm((w_i * T_(i+1) - D_(i+1))+), after the whole chain from T.

Source: block verification, Sun et al., arXiv 2403.10444. Their M_b is our T, M_s our D, p_i our w_i,
tau the accepted length.
Lossless in distribution; the text depends on the draft. No rule accepts more of one chain: at least as much as `token`,
and the same for chains of one. Costs two passes over the vocabulary for every drafted token, rejected or not.
Takes one child per node: drawn (iid) or certain (point: then w is the product of T along the chain). `traversal` is its
generalization to trees.
"""

from __future__ import annotations

from typing import ClassVar, final

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import (
    RandomSource,
    Verifier,
    acceptance,
    draft_distribution,
    normalised,
    require_chain,
    residual,
    share_left,
    target_distribution,
)


@final
class Block(Verifier):
    """One coin for every prefix of the chain, longest first."""

    accepts: ClassVar[frozenset[Draw]] = frozenset({Draw.IID, Draw.POINT})
    chains_only: ClassVar[bool] = True
    needs_distributions: ClassVar[bool] = True

    def verify(self, tree: TokenTree, distributions: NodeDistributions, random: RandomSource) -> Verdict:
        """Compute weights from the start of the chain, then toss coins from its end."""
        require_chain(tree, "block")
        length = len(tree)
        weights = [1.0]
        rests = []
        for node, token in enumerate(tree.tokens):
            target = target_distribution(distributions, node)
            draft = draft_distribution(tree, node, vocab_size=len(target))
            rests.append(residual(target, draft, weight=weights[-1]))
            weights.append(acceptance(target, draft, token, weight=weights[-1]))
        if random.accepts(weights[length]):
            return Verdict(tuple(range(length)), random.draw(target_distribution(distributions, length)))
        kept = length - 1
        while kept > 0 and not random.accepts(share_left(rests[kept], weights[kept])):
            kept -= 1
        left = normalised(rests[kept], otherwise=target_distribution(distributions, kept))
        return Verdict(tuple(range(kept)), random.draw(left))
