"""A rule with a mistake that exact and statistical tests must both detect. Not a test itself."""

from __future__ import annotations

from draftree.core.tree import TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import RandomSource, acceptance, draft_distribution, target_distribution


def bonus_from_the_target(tree: TokenTree, distributions: NodeDistributions, chance: RandomSource) -> Verdict:
    """`token`, but after a reject the bonus is drawn from T instead of what is left of it."""
    for node, token in enumerate(tree.tokens):
        target = target_distribution(distributions, node)
        if not chance.accepts(acceptance(target, draft_distribution(tree, node, vocab_size=len(target)), token)):
            return Verdict(tuple(range(node)), chance.draw(target))
    return Verdict(tuple(range(len(tree))), chance.draw(target_distribution(distributions, len(tree))))
