"""Base class of drafters that grow trees with a draft model or with layers of the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree.core.tree import TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import Drafter, DraftTraits, Observation, SequenceView
from draftree.drafters.tree_builder.builder import Shape, TreeBuilder
from draftree.drafters.tree_builder.vocabularies import StringTreeBuilder


class TreeBuildingDrafter(Drafter[Any]):
    """Drafter that grows trees of the shape in its configuration.

    A method sets `_growth`, and `_note` if there is a message.
    """

    _growth: TreeBuilder | StringTreeBuilder
    _note = ""

    @classmethod
    def describe(cls, config: Any) -> DraftTraits:
        """Return the traits of the shape; confidence is the model's probability."""
        shape: Shape = config.shape
        return DraftTraits(
            draws=shape.draws,
            depth=shape.depth,
            nodes=shape.num_nodes,
            branches=not shape.is_chain,
            gives_confidence=True,
            runs_model=True,
        )

    @property
    def note(self) -> str:
        """Message about decisions during construction; empty if none."""
        return self._note

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room in the slots of the draft model."""
        self._growth.reserve(num_sequences, length)

    def open(self, sequence: SequenceView) -> Any:
        """Return a state with a slot of the draft model, or with the target's slot."""
        return self._growth.open(sequence)

    def draft(self, states: Sequence[Any], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Return a tree for every sequence, with one pass per level for all sequences."""
        return self._growth.grow(states, budgets)

    def observe(self, observations: Sequence[Observation[Any]]) -> None:
        """Keep accepted tokens in the slots; prefill prompts in the target's chunks."""
        judged = [(o.state, o.verdict) for o in observations if o.verdict is not None]
        if judged:
            self._growth.observe([state for state, _ in judged], [verdict for _, verdict in judged])
        chunks = [o for o in observations if o.verdict is None]
        if chunks:
            self._growth.read([o.state for o in chunks], [o.tokens_read for o in chunks])

    def fork(self, state: Any, sequence: SequenceView, length: int) -> Any:
        """Return a state with a copy of the slot's common prefix with the new text."""
        return self._growth.fork(state, sequence)

    def detach(self, state: Any, length: int) -> Any:
        """Keep the slot and drop its tree."""
        return self._growth.detach(state)

    def attach(self, state: Any, sequence: SequenceView, length: int) -> Any:
        """Return the state, with the slot cut to the common prefix with the new text."""
        return self._growth.attach(state, sequence)

    def check_integrity(self, states: Sequence[Any]) -> None:
        """Check the slots."""
        self._growth.check_integrity(states)

    def close(self, state: Any) -> None:
        """Free the slot unless it is the target's."""
        self._growth.close(state)
