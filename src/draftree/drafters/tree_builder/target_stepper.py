"""Stepper for a subset of the target's layers, on the target's slots, keys and values.

The last tokens of the text, which the target has not read, become partial nodes, followed by the tree. If the subset is
the first layers, the target's pass continues from these nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.tree import ROOT
from draftree.drafters.base import SequenceView
from draftree.drafters.tree_builder.builder import IntRows, Stepper
from draftree.models.base import ALL_LAYERS, Extend, LanguageModel, LayerSubset, Pass, Slot, Truncate
from draftree.sampling.logits import Logits

MAX_WASTED_ROWS = 64
"""Maximum number of unread tokens for drafting if the target's pass cannot continue from partial nodes: a long prompt
would be computed twice for one tree. The target reads it first, and the next round drafts."""


@dataclass(slots=True)
class PartialSequence:
    """State of a sequence. Mutated by `PartialStepper` and `TreeBuilder` only."""

    view: SequenceView
    slot: Slot
    fed: dict[int, int] = field(default_factory=dict)
    root: int = 0
    """Partial node of the text's last token."""


@final
class PartialStepper(Stepper[PartialSequence]):
    """Stepper that runs a subset of the target's layers.

    Args:
        answers: whether the states of the logits are kept; for the first layers only.
    """

    def __init__(self, model: LanguageModel, part: LayerSubset, *, answers: bool = False) -> None:
        model.require_part(part)
        self._capture: tuple[int, ...] = ()
        if answers:
            assert part.end is not None, "only the first layers have an end"
            model.require_capture((part.end,))
            self._capture = (part.end,)
        self.model = model
        self.max_length = self.max_depth = model.max_length
        # a subset of all layers is still a subset: a whole pass would append tentative nodes
        self._part = LayerSubset(end=model.num_layers) if part == ALL_LAYERS else part
        self._continues = self._part.is_beginning and not model.footprint.state

    def reserve(self, num_sequences: int, length: int) -> None:
        self.model.reserve(num_sequences, length)

    def open(self, view: SequenceView) -> PartialSequence:
        assert view.slot is not None, "the target's slot is opened before the drafter's state"
        return PartialSequence(view, view.slot)

    def close(self, state: PartialSequence) -> None:
        """Do nothing: the slot is the target's."""

    def is_ready(self, state: PartialSequence) -> bool:
        """Return whether few tokens are unread or the target's pass continues from partial nodes.

        Partial nodes of a long prompt would need a recurrent state each.
        """
        return self._continues or len(state.view.history) - state.slot.length <= MAX_WASTED_ROWS

    def catch_up(self, states: Sequence[PartialSequence], ahead: Sequence[int]) -> Logits:
        self.model.apply([Truncate(state.slot, state.slot.length) for state in states])
        jobs = []
        for state in states:
            unread: list[int] = state.view.history.tokens[state.slot.length :].tolist()
            state.root = len(unread) - 1
            state.fed.clear()
            jobs.append(Extend(state.slot, unread, range(-1, state.root), logits_at=[state.root]))
        return self._run(jobs)

    def feed(self, states: Sequence[PartialSequence], tokens: IntRows, parents: IntRows) -> Logits:
        jobs = [
            Extend(state.slot, row, [state.root if parent == ROOT else state.root + 1 + parent for parent in above])
            for state, row, above in zip(states, tokens, parents, strict=True)
        ]
        return self._run(jobs)

    def _run(self, jobs: Sequence[Extend]) -> Logits:
        result = self.model.run(Pass(jobs, self._part, self._capture))
        if result.hidden is not None:
            rows = [result.row_starts[index] + node for index, job in enumerate(jobs) for node in job.rows]
            self.answered = self.model.final_norm(result.hidden[rows, 0])
        return result.logits

    def keep(self, states: Sequence[PartialSequence], paths: IntRows) -> None:
        for state in states:
            state.fed.clear()
