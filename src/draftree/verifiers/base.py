"""The verify seam: a pure function of a tree, the target's distributions and chance.

A verifier sees no model, cache, tokenizer or clock.
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
    """What a text has in common with the texts of plain decoding."""

    SAME_TEXT = "same text"
    """Token for token the text of plain decoding with the same seed."""
    SAME_DISTRIBUTION = "same distribution"
    """Another text for a given seed, distributed as the texts of plain decoding."""
    LOSSY = "lossy"
    """Distributed differently."""


class Verifier(ABC):
    """Keeps of a tree what the target accepts. Built as `cls(config)`."""

    Config: ClassVar[type]
    accepts: ClassVar[frozenset[Draw]]
    """The draws under which the rule is right."""
    chains_only: ClassVar[bool] = False
    """Whether every node may have at most one child."""
    lossless: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False
    """Whether the drafter may rank with the request's own noise. Rules that look at the draft distribution must not
    share: a draw that the verifier's noise explains is no draw."""
    needs_distributions: ClassVar[bool] = False
    """Whether trees must carry the distributions that their nodes were drawn from (point draws need none)."""
    wants_distributions: ClassVar[bool] = False
    """Whether the rule, though it takes all draws, does better with distributions: the drafter gives them where it
    can."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def promise(cls, temperature: float) -> Promise:
        """What the rule promises for texts written at this temperature."""
        if temperature == 0:
            return Promise.SAME_TEXT  # the target's distribution is one token, and every rule keeps only that one
        if not cls.lossless:
            return Promise.LOSSY
        # a lossless rule that reads no draft distribution follows the target's own picks
        return Promise.SAME_DISTRIBUTION if cls.needs_distributions else Promise.SAME_TEXT

    @abstractmethod
    def verify(self, tree: TokenTree, distributions: NodeDistributions, chance: Chance) -> Verdict:
        """Walk the tree.

        Args:
            tree: the drafted tree, possibly empty.
            distributions: the target's distributions; row 0 at the root, row 1 + i at node i.
            chance: decisions of this round alone, independent of whatever drafted.
        """

    def verify_many(
        self, trees: Sequence[TokenTree], distributions: Sequence[NodeDistributions], chances: Sequence[Chance]
    ) -> list[Verdict]:
        """`verify` for the sequences of a round; a rule may walk them side by side."""
        return [self.verify(*given) for given in zip(trees, distributions, chances, strict=True)]


def deepest_path(tree: TokenTree, is_kept: Callable[[int], bool]) -> list[int]:
    """The longest way down from the root over kept nodes; the first drafted among equals.

    Args:
        tree: the drafted tree.
        is_kept: asked once for every node whose parent is kept, or is the root.
    """
    depth_of = {ROOT: 0}
    deepest = ROOT
    for node, parent in enumerate(tree.parents):
        if parent in depth_of and is_kept(node):
            depth_of[node] = depth_of[parent] + 1
            if depth_of[node] > depth_of[deepest]:
                deepest = node
    return tree.path(deepest)
