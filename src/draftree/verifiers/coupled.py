"""Accepts the target tokens under the request's noise: lossless token for token, for any tree and any drafter.

At every node the target token is argmax(log distribution + noise), a function of the seed, the position and the
logits. The walk continues while it is one of the children; the target token at its end is the bonus. The text
therefore equals plain decoding's, token for token, for every draft; at temperature 0 there is no noise and
the rule is greedy verification.

Source: Daliri, Musco, Suresh, arXiv 2408.07978 (drafter-invariant speculative decoding by Gumbel coupling);
Kobus, Gündüz, arXiv 2504.15475 (exponential races; trees). Greedy: SpecInfer, arXiv 2305.09781, VerifyGreedy.
Lossless, and drafter-invariant. Costs nothing beyond the target tokens. A drafter that ranks with the same noise
proposes the target token first with probability J(T, D) = sum_i 1 / sum_j max(T_j/T_i, D_j/D_i): on a chain that is
less than the sum of min(T, D) that `token` reaches, so a single chain at high temperature has a lower acceptance.
"""

from __future__ import annotations

from typing import ClassVar, final

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import RandomSource, Verifier, follow_picks


@final
class Coupled(Verifier):
    """Descends while the pick is a child; independent of draft distributions, hence takes all draws."""

    accepts: ClassVar[frozenset[Draw]] = frozenset(Draw)
    shares_noise: ClassVar[bool] = True
    follows_picks: ClassVar[bool] = True

    def verify(self, tree: TokenTree, distributions: NodeDistributions, random: RandomSource) -> Verdict:
        return follow_picks(tree, distributions)
