"""Drafters of texts, such as `ngram` and `suffix`, for beams: every live beam is a text of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from draftree.beam.drafting.base import MAX_NODES, BeamDrafter, Draft
from draftree.core.types import Budget
from draftree.drafters.base import Drafter, SequenceView
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams

if TYPE_CHECKING:
    from draftree.beam.scoring import SearchStats
    from draftree.beam.state import TextSearch


@final
class TextDrafts(BeamDrafter):
    """Drafts of a drafter that reads texts only. The source of an encoder-decoder model is read too.

    Args:
        drafter: needs neither passes of a model nor hidden states or picks of the target.
        vocab_size: number of token ids.
    """

    def __init__(self, drafter: Drafter[Any], vocab_size: int) -> None:
        self._drafter = drafter
        self._controls: Controls = build_controls(SamplingParams(temperature=0), vocab_size=vocab_size, seed=0)

    def propose(self, depths: Mapping[TextSearch, int], stats: SearchStats) -> list[list[Draft]]:
        """Return a tree for every live beam that has one."""
        beams = [(text, beam) for text in depths for beam in text.live]
        states, budgets = [], []
        for text, beam in beams:
            source = () if text.opening.source is None else text.opening.source.tokens
            history = History([*text.prompt, *beam.tokens])
            states.append(self._drafter.open(SequenceView(history, self._controls, owner=None, source=source)))
            nodes = max(1, MAX_NODES // len(text.live))
            budgets.append(Budget(min(nodes, 2 * depths[text]), depths[text]))
        trees = self._drafter.draft(states, budgets)
        found: dict[TextSearch, list[Draft]] = {text: [] for text in depths}
        for (text, beam), tree in zip(beams, trees, strict=True):
            if len(tree):
                found[text].append((beam, tree))
        return list(found.values())
