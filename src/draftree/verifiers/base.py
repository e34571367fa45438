"""The verify seam: a pure function of a tree, the target's laws and noise.

A verifier sees no model, cache, tokenizer or clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from draftree.core.noise import Noise
from draftree.core.registry import Registry
from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.laws import NodeLaws


class Verifier(ABC):
    """Keeps of a tree what the target accepts. Built as `cls(config)`."""

    Config: ClassVar[type]
    accepts: ClassVar[frozenset[Draw]]
    """The draws under which the rule is right."""
    chains_only: ClassVar[bool] = False
    """Whether every node may have at most one child."""
    lossless: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False
    """Whether the drafter may rank with the request's own noise. Rules that look at the draft law must not share:
    a draw that the verifier's noise explains is no draw."""
    needs_laws: ClassVar[bool] = False
    """Whether trees must carry the laws that their nodes were drawn from."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def verify(self, tree: TokenTree, laws: NodeLaws, noise: Noise) -> Verdict:
        """Walk the tree.

        Args:
            tree: the drafted tree, possibly empty.
            laws: the target's laws; row 0 at the root, row 1 + i at node i.
            noise: a stream of this round alone, independent of whatever drafted.
        """


VERIFIERS: Registry[Verifier] = Registry("draftree.verifiers", "draftree.verifiers.base:Verifier", kind="verifier")
