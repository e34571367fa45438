"""Several drafters of a beam search as one: equal nodes of their drafts are scored once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

from draftree.beam.drafting.base import BeamDrafter, Draft

if TYPE_CHECKING:
    from draftree.beam.forest import Forest
    from draftree.beam.scoring import SearchStats
    from draftree.beam.state import TextSearch


@final
class SeveralDrafters(BeamDrafter):
    """The drafts of all, in order; at most one of them has a model.

    Args:
        drafters: the drafters.
    """

    def __init__(self, drafters: Sequence[BeamDrafter]) -> None:
        self._drafters = list(drafters)

    def start(self, text: TextSearch, *, capacity: int, length: int) -> None:
        """Prepare all."""
        for drafter in self._drafters:
            drafter.start(text, capacity=capacity, length=length)

    def forests(self, text: TextSearch) -> Sequence[Forest]:
        """Return the trees of the one with a model."""
        return [forest for drafter in self._drafters for forest in drafter.forests(text)]

    def propose(self, depths: Mapping[TextSearch, int], stats: SearchStats) -> list[list[Draft]]:
        """Return the drafts of all."""
        each = [drafter.propose(depths, stats) for drafter in self._drafters]
        return [[draft for drafts in own for draft in drafts] for own in zip(*each, strict=True)]

    def finish(self, text: TextSearch) -> None:
        """Finish in all."""
        for drafter in self._drafters:
            drafter.finish(text)
