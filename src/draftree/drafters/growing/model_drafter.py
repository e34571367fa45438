"""What drafters have in common that grow their trees with a model: their own one, or the target's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree.core.tree import TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import Drafter, DraftTraits, Observation, SequenceView
from draftree.drafters.growing.shapes import Shape
from draftree.drafters.growing.strings import StringGrowth
from draftree.drafters.growing.tree_growth import Growth


class GrowingDrafter(Drafter[Any]):
    """Grows trees in the shape that its configuration names as `shape`.

    A method sets `_growth`, and `_note` where it has something to say.
    """

    _growth: Growth | StringGrowth
    _note = ""

    @classmethod
    def describe(cls, config: Any) -> DraftTraits:
        """As the shape says; confidence is the model's own probability."""
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
        """What was decided when the drafter was built; empty if nothing."""
        return self._note

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room in the slots of the model that grows the trees."""
        self._growth.reserve(num_sequences, length)

    def open(self, sequence: SequenceView) -> Any:
        """A slot of that model; of the target the one that is there."""
        return self._growth.open(sequence)

    def draft(self, states: Sequence[Any], budgets: Sequence[Budget]) -> list[TokenTree]:
        """A tree for every sequence, all sequences in one pass a level."""
        return self._growth.grow(states, budgets)

    def observe(self, observations: Sequence[Observation[Any]]) -> None:
        """Keep the accepted tokens in the slots; read prompts in chunks beside the target."""
        judged = [(o.state, o.verdict) for o in observations if o.verdict is not None]
        if judged:
            self._growth.observe([state for state, _ in judged], [verdict for _, verdict in judged])
        chunks = [o for o in observations if o.verdict is None]
        if chunks:
            self._growth.read([o.state for o in chunks], [o.tokens_read for o in chunks])

    def fork(self, state: Any, sequence: SequenceView, length: int) -> Any:
        """A copy of what the slot has read of the new text."""
        return self._growth.fork(state, sequence)

    def detach(self, state: Any, length: int) -> Any:
        """Keep the slot, without a tree."""
        return self._growth.detach(state)

    def attach(self, state: Any, sequence: SequenceView, length: int) -> Any:
        """The slot, cut to what it has read of the new text."""
        return self._growth.attach(state, sequence)

    def check_integrity(self, states: Sequence[Any]) -> None:
        """Check the slots."""
        self._growth.check_integrity(states)

    def close(self, state: Any) -> None:
        """Free the slot, if it is not the target's."""
        self._growth.close(state)
