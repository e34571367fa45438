"""Runners-up of the last step as drafts: tokens that almost continued a beam's parent often continue the beam.

They cost nothing and need no model. A beam is one token long after its parent, so only one level is drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from draftree.beam.drafting.base import BeamDrafter, Draft
from draftree.core.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from draftree.beam.group import Beam
    from draftree.beam.scoring import SearchStats
    from draftree.beam.state import TextSearch


@final
class RunnersUp(BeamDrafter):
    """Drafts of the last step's other candidates.

    Args:
        count: maximum number of tokens after each beam.
    """

    def __init__(self, count: int = 2) -> None:
        self._count = count

    def propose(self, depths: Mapping[TextSearch, int], stats: SearchStats) -> list[list[Draft]]:
        """Return the candidates that continued the same parent, best first, after each beam."""
        return [[(beam, tree) for beam in text.live if len(tree := self._tree(text, beam))] for text in depths]

    def _tree(self, text: TextSearch, beam: Beam) -> TokenTree:
        others = [
            token
            for parent, token in text.last_candidates
            if parent == beam.tokens[:-1] and token != beam.tokens[-1] and token not in text.ends
        ]
        tokens = tuple(dict.fromkeys(others))[: self._count]
        return TokenTree(tokens, (ROOT,) * len(tokens))
