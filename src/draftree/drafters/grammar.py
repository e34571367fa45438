"""Only what the grammar of a request forces is drafted: jump-forward decoding. Without a grammar it drafts nothing.

Behind `"name": "` of a JSON schema there may be one way on, such as `", "age": `, which needs a pass and no guess.
Where one token is allowed it is certain to be accepted; where several spell the beginning of one text the longest is
drafted, which models seldom cut otherwise. Every other drafter does the same beside its own guesses.

Source: jump-forward decoding (Zheng et al., arXiv 2312.07104, section 4); masks by xgrammar, arXiv 2411.15100.
Costs nothing beyond the masks. Pays for schemas with long names and fixed parts, does nothing for free text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from draftree.core.tree import EMPTY, TokenTree, chain
from draftree.core.types import Budget
from draftree.drafters.base import DraftTraits, SequenceView
from draftree.drafters.lookup.chains import ChainDrafter, require_length


@final
class GrammarDrafter(ChainDrafter):
    """Asks the request's guide what must follow."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`k`: tokens ahead at most."""

        k: int = 16

        def __post_init__(self) -> None:
            require_length("grammar", self.k)

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        """A chain, from grammars alone."""
        return replace(super().describe(config), reads_grammars=True)

    def draft_one(self, state: SequenceView, budget: Budget) -> TokenTree:
        """The forced tokens behind the text."""
        guide = state.controls.guide
        if guide is None:
            return EMPTY
        most = min(budget.num_nodes, budget.depth, self._config.k)
        return chain(guide.forced(state.history, (), most), draw=self._draw)
