"""Slots of a replayed target: where the nodes of a draft lie in the recorded text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Extend, Slot
from draftree.models.replay.text import RecordedText

__all__ = ["ReplaySlot", "replayed"]

BESIDE = -1
"""Pick at a node beside the text: it is not known, and the walk does not reach it."""


@final
class ReplaySlot(Slot):
    """A slot of a replayed target. Mutated by `ReplayModel` only.

    Args:
        number: its id.
        text: the recorded text.
    """

    def __init__(self, number: int, text: RecordedText) -> None:
        self._id, self.text = number, text
        self.held, self.tentative = 0, 0

    @property
    def id(self) -> int:
        """Lowest free number when the slot was opened."""
        return self._id

    @property
    def length(self) -> int:
        """Tokens in the committed prefix."""
        return self.held

    @property
    def num_tentative(self) -> int:
        """Tokens in the tentative tree."""
        return self.tentative

    def places(self, job: Extend) -> list[int | None]:
        """Return for each node its position in prompt and text; None for a node beside them."""
        text, start = self.text, len(self.text.prompt)
        found: list[int | None] = []
        for token, parent in zip(job.tokens, job.parents, strict=True):
            before = self.held - 1 if parent < 0 else found[parent]
            place = None if before is None else before + 1
            if place is not None and place >= start:
                is_right = place - start < len(text.tokens) and text.tokens[place - start] == token
                place = place if is_right else None
            found.append(place)
        return found

    def picks(self, job: Extend, places: Sequence[int | None]) -> list[int]:
        """Return the text's next token at each requested row."""
        rows = range(len(job.tokens)) if job.logits_at is None else job.logits_at
        tokens, start = self.text.tokens, len(self.text.prompt)
        found = []
        for row in rows:
            place = places[row]
            is_known = place is not None and 0 <= place + 1 - start < len(tokens)
            found.append(tokens[place + 1 - start] if place is not None and is_known else BESIDE)
        return found

    def states(self, places: Sequence[int | None], layers: Sequence[int]) -> Tensor:
        """Return recorded states at positions, zeros beside the text, shape (positions, layers, hidden)."""
        text = self.text
        missing = [layer for layer in layers if text.hidden is None or layer not in text.layers]
        if missing or text.hidden is None:
            raise UnsupportedModelError(f"hidden states of layers {missing} were not recorded")
        columns = [text.layers.index(layer) for layer in layers]
        known = [0 if place is None or place >= len(text.hidden) else place for place in places]
        found = text.hidden[known][:, columns]
        for row, place in enumerate(places):
            if place is None or place >= len(text.hidden):
                found[row] = 0
        return found


def replayed(slot: Slot) -> ReplaySlot:
    """Return a slot as one of a replayed target."""
    assert isinstance(slot, ReplaySlot), "a replayed target has replay slots"
    return slot
