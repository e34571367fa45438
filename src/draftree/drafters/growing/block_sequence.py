"""State of a sequence in a head that drafts all levels in one pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from draftree.drafters.base import SequenceView
from draftree.drafters.growing.kept_rows import KeptRows
from draftree.drafters.growing.unread import Unread


@dataclass(frozen=True, slots=True)
class Levels:
    """Result of a pass for one text.

    Attributes:
        length: length of the text.
        states: states of the levels, shape (levels, hidden).
        logits: logits without bias, shape (levels, draft vocabulary).
        memory: memory of the head's bias before level 0, shape (1, width); None without one.
    """

    length: int
    states: Tensor
    logits: Tensor
    memory: Tensor | None


@dataclass(slots=True)
class BlockSequence:
    """State of a sequence in a head. Mutated by `BlockStepper` and `Growth` only."""

    view: SequenceView
    kept: KeptRows = field(default_factory=KeptRows)
    positions: list[int] = field(default_factory=list)
    """Positions of the kept rows, ascending."""
    unread: list[Unread] = field(default_factory=list)
    """Rows after them, ascending."""
    fed: dict[int, int] = field(default_factory=dict)
    levels: Levels | None = None
    """Result of the last pass; of use as long as the text is the same."""
    depths: list[int] = field(default_factory=list)
    """Levels of the children of each node of the tree that was fed."""
    memories: list[Tensor | None] = field(default_factory=list)
    """Memory of the bias after the text's last token and after each node."""

    @property
    def end(self) -> int:
        """Position after the last row that is read or can be read."""
        return self.unread[-1].end if self.unread else self.positions[-1] + 1 if self.positions else 0

    def has_levels(self) -> bool:
        """Return whether the last pass was for the present text."""
        return self.levels is not None and self.levels.length == len(self.view.history)
