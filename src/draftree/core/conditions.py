"""Conditions on which one of several merged drafters drafts: what it adds to the drafts of the others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from draftree.core.tree import TokenTree, depths


@dataclass(frozen=True, slots=True)
class DraftCondition:
    """Minimum gain of a draft beside earlier drafts of other drafters in the same round.

    A token of the draft gains nothing where an earlier draft has the accepted token of that level. The two are taken as
    independent, so level l gains gains[l] * (1 - trust * s[l]), where s[l] is the highest survival of the earlier nodes
    of the level by their own scores.

    Attributes:
        gains: expected tokens of each level without other drafts.
        least: expected tokens that the draft must add.
        trust: acceptance of the earlier drafts relative to their scores.
    """

    gains: tuple[float, ...]
    least: float
    trust: float = 1.0

    def is_met(self, trees: Iterable[TokenTree]) -> bool:
        """Return whether a draft is worth its cost beside these trees; trees without scores are ignored."""
        survivals = [0.0] * len(self.gains)
        for tree in trees:
            for level, score in zip(depths(tree.parents), tree.scores, strict=False):
                if level <= len(survivals):
                    survivals[level - 1] = max(survivals[level - 1], min(1.0, self.trust * math.exp(score)))
        return sum(gain * (1.0 - s) for gain, s in zip(self.gains, survivals, strict=True)) >= self.least
