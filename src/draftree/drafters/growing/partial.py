"""Stepping a part of the target's own layers: on the target's own slots, with the target's own keys and values.

Nothing is read twice and nothing is held twice. The text's last tokens, which the target has not read, are sketched
as well, and the tree behind them; where the part is the first layers, the target's pass goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.tree import ROOT, TokenTree
from draftree.drafters.base import SequenceView
from draftree.drafters.growing.stepper import Stepper
from draftree.models.base import Extend, LanguageModel, LayerSubset, Scores, Slot

MAX_WASTED_ROWS = 64
"""Unread tokens of a text that are sketched at most where the target's pass cannot use it: a long prompt would be read
twice for a single tree. The target reads it, and the next round drafts."""


@dataclass(slots=True)
class PartialSequence:
    """What is known of a sequence. Mutated by `PartialStepper` and `Growth` only."""

    view: SequenceView
    slot: Slot
    fed: dict[int, int] = field(default_factory=dict)
    root: int = 0
    """The sketched node that is the text's last token."""


@final
class PartialStepper(Stepper[PartialSequence]):
    """Sketches texts and trees.

    Args:
        model: the target.
        part: of its layers.

    Raises:
        UnsupportedModelError: the target cannot run this part.
    """

    def __init__(self, model: LanguageModel, part: LayerSubset) -> None:
        model.require_part(part)
        self.model = model
        self.max_depth = model.max_length
        self._part = part

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room in the target's slots."""
        self.model.reserve(num_sequences, length)

    def open(self, view: SequenceView) -> PartialSequence:
        """State for a new sequence."""
        assert view.slot is not None, "the target's slot is there before the drafter's state"
        return PartialSequence(view, view.slot)

    def close(self, state: PartialSequence) -> None:
        """The slot is the target's."""

    def is_ready(self, state: PartialSequence) -> bool:
        """Whether little is unread, or what is sketched of it is not lost."""
        return self._part.is_beginning or len(state.view.history) - state.slot.length <= MAX_WASTED_ROWS

    def catch_up(self, states: Sequence[PartialSequence], ahead: Sequence[int]) -> Scores:
        """Sketch what the target has not read."""
        self.model.erase([state.slot for state in states])
        jobs = []
        for state in states:
            unread: list[int] = state.view.history.tokens[state.slot.length :].tolist()
            state.root = len(unread) - 1
            state.fed.clear()
            jobs.append(Extend(state.slot, unread, range(-1, state.root), logits_at=[state.root]))
        return self.model.sketch(jobs, self._part)

    def feed(
        self, states: Sequence[PartialSequence], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> Scores:
        """Sketch new nodes of trees."""
        jobs = [
            Extend(state.slot, row, [state.root if parent == ROOT else state.root + 1 + parent for parent in above])
            for state, row, above in zip(states, tokens, parents, strict=True)
        ]
        return self.model.sketch(jobs, self._part)

    def keep(self, states: Sequence[PartialSequence], paths: Sequence[Sequence[int]]) -> None:
        """The target has kept what there is to keep."""
        for state in states:
            state.fed.clear()

    def follow(self, states: Sequence[PartialSequence], trees: Sequence[TokenTree]) -> None:
        """As `keep`: the target reads its own tokens."""
        self.keep(states, [()] * len(states))
