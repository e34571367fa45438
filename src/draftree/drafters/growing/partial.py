"""Stepping a part of the target's own layers: on the target's own slots, with the target's own keys and values.

Nothing is read twice and nothing is held twice. The text's last tokens, which the target has not read, become partial
nodes as well, and the tree after them; where the part is the first layers, the target's pass continues from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.tree import ROOT, TokenTree
from draftree.drafters.base import SequenceView
from draftree.drafters.growing.stepper import Stepper
from draftree.models.base import ALL_LAYERS, Extend, LanguageModel, LayerSubset, Pass, Slot, Truncate
from draftree.sampling.logits import Logits

MAX_WASTED_ROWS = 64
"""Unread tokens of a text that are computed in part at most where the target's pass cannot use it: a long prompt would
be read twice for a single tree. The target reads it, and the next round drafts."""


@dataclass(slots=True)
class PartialSequence:
    """What is known of a sequence. Mutated by `PartialStepper` and `Growth` only."""

    view: SequenceView
    slot: Slot
    fed: dict[int, int] = field(default_factory=dict)
    root: int = 0
    """The partial node that is the text's last token."""


@final
class PartialStepper(Stepper[PartialSequence]):
    """Reads texts and trees with a part of the layers.

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
        # a part that leaves nothing out is a part nevertheless: a whole pass would append tentative nodes
        self._part = LayerSubset(end=model.num_layers) if part == ALL_LAYERS else part

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
        """Whether little is unread, or the target's pass can use what is computed of it."""
        return self._part.is_beginning or len(state.view.history) - state.slot.length <= MAX_WASTED_ROWS

    def catch_up(self, states: Sequence[PartialSequence], ahead: Sequence[int]) -> Logits:
        """Compute, in part, what the target has not read."""
        self.model.apply([Truncate(state.slot, state.slot.length) for state in states])
        jobs = []
        for state in states:
            unread: list[int] = state.view.history.tokens[state.slot.length :].tolist()
            state.root = len(unread) - 1
            state.fed.clear()
            jobs.append(Extend(state.slot, unread, range(-1, state.root), logits_at=[state.root]))
        return self.model.run(Pass(jobs, self._part)).logits

    def feed(
        self, states: Sequence[PartialSequence], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> Logits:
        """Compute new nodes of trees in part."""
        jobs = [
            Extend(state.slot, row, [state.root if parent == ROOT else state.root + 1 + parent for parent in above])
            for state, row, above in zip(states, tokens, parents, strict=True)
        ]
        return self.model.run(Pass(jobs, self._part)).logits

    def keep(self, states: Sequence[PartialSequence], paths: Sequence[Sequence[int]]) -> None:
        """The target has kept what there is to keep."""
        for state in states:
            state.fed.clear()

    def follow(self, states: Sequence[PartialSequence], trees: Sequence[TokenTree]) -> None:
        """As `keep`: the target reads its own tokens."""
        self.keep(states, [()] * len(states))
