"""Accepts each token of a chain with probability min(1, T/D), and after the first rejection draws from (T - D)+.

A drafted token x was drawn from D. Accepted with probability min(1, T(x)/D(x)) it contributes min(T, D) to the output
distribution; a draw from norm((T - D)+) after a rejection contributes the rest, so the sum is T. If all are accepted,
the bonus is drawn from the target's distribution after the last.

Source: Leviathan, Kalman, Matias, arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2. Their
target distribution p (q in Chen) is our T, their draft distribution q (p in Chen) our D.
Lossless in distribution; the text depends on the draft. Costs a pass over the vocabulary for every token tried.
For a single token no rule accepts more; `block` accepts more of a chain, trees more than either. Takes one child per
node: drawn from a distribution (iid) or certain (point: then D is 1 at the token, and T(x) is the acceptance).
Children selected by rank are not draws, and would bias the text.
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
    target_distribution,
)


@final
class Token(Verifier):
    """One coin per token; the first rejection ends the walk."""

    accepts: ClassVar[frozenset[Draw]] = frozenset({Draw.IID, Draw.POINT})
    chains_only: ClassVar[bool] = True
    needs_distributions: ClassVar[bool] = True

    def verify(self, tree: TokenTree, distributions: NodeDistributions, random: RandomSource) -> Verdict:
        require_chain(tree, "token")
        for node, token in enumerate(tree.tokens):
            target = target_distribution(distributions, node)
            draft = draft_distribution(tree, node, vocab_size=len(target))
            if not random.accepts(acceptance(target, draft, token)):
                left = normalised(residual(target, draft), otherwise=target)
                return Verdict(tuple(range(node)), random.draw(left))
        return Verdict(tuple(range(len(tree))), random.draw(target_distribution(distributions, len(tree))))
