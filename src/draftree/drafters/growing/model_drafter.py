"""What drafters have in common that grow their trees with a model: their own one, or the target's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import Drafter, SequenceView
from draftree.drafters.growing.shapes import Shape
from draftree.drafters.growing.strings import StringGrowth
from draftree.drafters.growing.tree_growth import Growth


class GrowingDrafter(Drafter[Any]):
    """Grows trees in the shape that its configuration names as `shape`.

    A method sets `_growth`, and `_note` where it has something to say.
    """

    runs_model = True
    _growth: Growth | StringGrowth
    _note = ""

    @classmethod
    def draws(cls, config: Any) -> frozenset[Draw]:
        """Those of the shape."""
        shape: Shape = config.shape
        return shape.draws

    @classmethod
    def default_depth(cls, config: Any) -> int:
        """As deep as the shape."""
        shape: Shape = config.shape
        return shape.depth

    @classmethod
    def default_nodes(cls, config: Any) -> int:
        """As many as the shape has."""
        shape: Shape = config.shape
        return shape.num_nodes

    @classmethod
    def branches(cls, config: Any) -> bool:
        """Whether the shape has a node with two children."""
        shape: Shape = config.shape
        return not shape.is_chain

    @classmethod
    def gives_confidence(cls, config: Any) -> bool:
        """The model's own probabilities."""
        return True

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

    def observe(self, states: Sequence[Any], trees: Sequence[TokenTree], verdicts: Sequence[Verdict]) -> None:
        """Keep the accepted tokens in the slots."""
        self._growth.observe(states, verdicts)

    def close(self, state: Any) -> None:
        """Free the slot, if it is not the target's."""
        self._growth.close(state)
