"""Block verification on trees: a branch is verified from its leaf up, and its residual goes to the next branch.

A node is entered with the probability w that the path to it may be accepted. Its children are tried in draw order, each
entered with min(1, w * T(x)/D(x)); when a child with its whole subtree is rejected, T becomes its residual
norm((w*T - D)+) with sum s, and w becomes s / (s + 1 - w). When no child is accepted the node itself is, with
probability w, and the bonus is drawn from the remaining T.

Source: traversal verification for speculative tree decoding, arXiv 2505.12398. On a chain it is `block`.
Lossless in distribution; the text depends on the draft. Accepts more of the same tree than `multistep` or `recursive`
(a few per cent of the drafted tokens), the more the deeper. Costs two passes over the vocabulary for every
node tried: whole branches are read before their start is rejected. Takes iid draws, duplicates kept, draws without
replacement whose siblings share one distribution, and point draws; all in draw order.
"""

from __future__ import annotations

from typing import ClassVar, final

from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import (
    WITH_DISTRIBUTIONS,
    RandomSource,
    Verifier,
    acceptance,
    draft_distribution,
    normalised,
    residual,
    share_left,
    target_distribution,
    used_before,
)


@final
class Traversal(Verifier):
    """One coin for every node, children before parents."""

    accepts: ClassVar[frozenset[Draw]] = WITH_DISTRIBUTIONS
    needs_distributions: ClassVar[bool] = True

    def verify(self, tree: TokenTree, distributions: NodeDistributions, random: RandomSource) -> Verdict:
        """Visit the root, which is always accepted."""
        children = tree.children()

        def visit(node: int, weight: float) -> Verdict | None:
            """Return the verdict at or below a node, None if all of it is rejected."""
            target = target_distribution(distributions, node + 1)
            siblings = children[node + 1]
            for index, child in enumerate(siblings):
                draft = draft_distribution(tree, child, vocab_size=len(target), used=used_before(tree, siblings, index))
                verdict = visit(child, acceptance(target, draft, tree.tokens[child], weight=weight))
                if verdict is not None:
                    return verdict
                rest = residual(target, draft, weight=weight)
                weight = share_left(rest, weight)
                target = normalised(rest, otherwise=target)
            # at the root the weight is 1 up to rounding
            if node == ROOT or random.accepts(weight):
                return Verdict(tuple(tree.path(node)), random.draw(target))
            return None

        verdict = visit(ROOT, 1.0)
        assert verdict is not None, "the root is kept whatever its weight"
        return verdict
