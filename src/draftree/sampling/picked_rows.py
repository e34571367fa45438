"""Picks of a target that returns no logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, final

from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.sampling.logits import Logits, Picks, RowNoise, Top

__all__ = ["PickedRows"]


def _ignored(num_rows: int) -> None:
    """Do nothing."""


@final
class PickedRows(Logits):
    """The target's picks at rows of a pass; -1 at rows beside the accepted path.

    Args:
        tokens: the pick of each row.
        width: tokens of the vocabulary.
        on_picks: called with the number of rows whenever they are picked.
    """

    __slots__ = ("_on_picks", "_tokens", "_width")
    has_controls: ClassVar[bool] = True

    def __init__(self, tokens: Sequence[int], width: int, on_picks: Callable[[int], None] = _ignored) -> None:
        self._tokens, self._width, self._on_picks = list(tokens), width, on_picks

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self._tokens)

    @property
    def width(self) -> int:
        """Tokens of the vocabulary."""
        return self._width

    def tensor(self) -> Tensor:
        """Raise: there are no logits."""
        raise UnsupportedModelError("this target returns accepted tokens and no logits: leave out what needs them")

    def rows(self, start: int, stop: int) -> PickedRows:
        """Some rows."""
        return PickedRows(self._tokens[start:stop], self._width, self._on_picks)

    def narrowed(self, width: int) -> PickedRows:
        """Return the same picks: there are no columns."""
        return self

    def replaced(self, tensor: Tensor) -> Logits:
        """Raise as `tensor`."""
        self.tensor()
        return self

    def picks(self, noise: RowNoise) -> Picks:
        """The picks, in which the request's controls and noise are applied already."""
        self._on_picks(len(self._tokens))
        return Picks(list(self._tokens), [True] * len(self._tokens))

    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        """Raise as `tensor`."""
        self.tensor()
        return Top([], [], [])
