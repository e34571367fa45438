"""The verifier interface: a pure function of a tree, the target's distributions and random decisions.

A verifier has no access to a model, cache, tokenizer or clock.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers import VERIFIERS
from draftree.verifiers.common.chance import Chance

__all__ = ["VERIFIERS", "Promise", "Verifier", "deepest_path"]


class Promise(enum.StrEnum):
    """The relation of a text to the texts of plain decoding."""

    SAME_TEXT = "same text"
    """Equal to the text of plain decoding with the same seed, token for token."""
    SAME_DISTRIBUTION = "same distribution"
    """Possibly another text for a given seed, with the distribution of plain decoding."""
    LOSSY = "lossy"
    """Another distribution."""


class Verifier(ABC):
    """Selects the accepted part of a tree. Constructed as `cls(config)`."""

    Config: ClassVar[type]
    accepts: ClassVar[frozenset[Draw]]
    """The draws under which the rule is correct."""
    chains_only: ClassVar[bool] = False
    """Whether every node may have at most one child."""
    lossless: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False
    """Whether the drafter may rank with the request's own noise. Verifiers that use the draft distribution must not
    share it: given the verifier's noise, such a draw would be determined."""
    needs_distributions: ClassVar[bool] = False
    """Whether trees must carry the distributions that their nodes were drawn from (point draws need none)."""
    follows_picks: ClassVar[bool] = False
    """Whether the verdict follows from the picks on the accepted path alone."""
    wants_distributions: ClassVar[bool] = False
    """Whether the rule, though it takes all draws, performs better with distributions, which the drafter then supplies
    if it can."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def promise(cls, temperature: float) -> Promise:
        """Return the promise for texts at this temperature."""
        if temperature == 0:
            return Promise.SAME_TEXT  # the target's distribution is one-hot, and every rule accepts only that token
        if not cls.lossless:
            return Promise.LOSSY
        # a lossless rule without draft distributions follows the target's own picks
        return Promise.SAME_DISTRIBUTION if cls.needs_distributions else Promise.SAME_TEXT

    @abstractmethod
    def verify(self, tree: TokenTree, distributions: NodeDistributions, chance: Chance) -> Verdict:
        """Verify a tree.

        Args:
            tree: the drafted tree, possibly empty.
            distributions: the target's distributions; row 0 at the root, row 1 + i at node i.
            chance: random decisions of this round, independent of the draft.
        """

    def verify_many(
        self, trees: Sequence[TokenTree], distributions: Sequence[NodeDistributions], chances: Sequence[Chance]
    ) -> list[Verdict]:
        """Verify the trees of a round; a rule may process them together."""
        return [self.verify(*given) for given in zip(trees, distributions, chances, strict=True)]


def deepest_path(tree: TokenTree, is_kept: Callable[[int], bool]) -> list[int]:
    """Return the longest path from the root over accepted nodes; the first drafted among equals.

    Args:
        tree: the drafted tree.
        is_kept: called once for every node whose parent is accepted, or is the root.
    """
    depth_of = {ROOT: 0}
    deepest = ROOT
    for node, parent in enumerate(tree.parents):
        if parent in depth_of and is_kept(node):
            depth_of[node] = depth_of[parent] + 1
            if depth_of[node] > depth_of[deepest]:
                deepest = node
    return tree.path(deepest)
