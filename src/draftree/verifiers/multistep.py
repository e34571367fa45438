"""Tries the children of a node one after another, each drawn independently, against what the others left of T.

Child x_i, drawn from D_i, is kept with probability min(1, T(x_i)/D_i(x_i)); a reject turns T into norm((T - D_i)+),
which is just what of the target is not yet written. After the last reject the bonus is drawn from what is left.

Source: SpecInfer, arXiv 2305.09781, VerifyStochastic; their P(. | u, LLM) is our T, their
P(. | u, SSM_s) our D_i, which may differ from child to child.
Lossless in distribution; the text depends on what was drafted. Costs a pass over the vocabulary for every child tried.
Children must stand in draw order, duplicates kept: a twin of a rejected child is never kept itself, but what it takes
off T belongs to the rule. Takes iid and point draws; children drawn without replacement have another distribution and
belong to `recursive`, which keeps more: what independent draws repeat is lost, most of all at low temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import Verifier
from draftree.verifiers.common.chance import Chance
from draftree.verifiers.common.ratios import walk_siblings


@final
class Multistep(Verifier):
    """One coin a child; the draft distribution stays as it is after a reject."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """Takes no options."""

    accepts: ClassVar[frozenset[Draw]] = frozenset({Draw.IID, Draw.POINT})
    needs_distributions: ClassVar[bool] = True

    def verify(self, tree: TokenTree, distributions: NodeDistributions, chance: Chance) -> Verdict:
        """Walk down, children in draw order."""
        return walk_siblings(tree, distributions, chance)
