"""Jump-forward decoding: drafts the tokens that the grammar of a request forces, and nothing without a grammar.

A JSON schema may allow only one continuation at a point, such as `", "age": `. If one token is allowed, it is always
accepted; if several tokens are prefixes of one forced text, the longest is drafted, which models usually choose too.
Every other drafter does the same in addition to its own proposals.

Source: jump-forward decoding (Zheng et al., arXiv 2312.07104, section 4); masks by xgrammar, arXiv 2411.15100.
Costs nothing beyond the masks. Gains with schemas that have long names and fixed parts; no effect on free text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from draftree.core.tree import EMPTY, TokenTree, chain
from draftree.core.types import Budget
from draftree.drafters.base import Drafter, DraftTraits, SequenceView, require_range


@final
class GrammarDrafter(Drafter[SequenceView]):
    """Drafter of forced tokens."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`k`: maximum number of tokens."""

        k: int = 16

        def __post_init__(self) -> None:
            require_range("grammar", self, "k")

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        return replace(super().describe(config), reads_grammars=True)

    def draft_one(self, state: SequenceView, budget: Budget) -> TokenTree:
        guide = state.controls.guide
        if guide is None:
            return EMPTY
        most = min(budget.num_nodes, budget.depth, self._config.k)
        return chain(guide.forced(state.history, (), most), draw=self._draw)
