"""Base class of drafters that read only the text and propose a chain."""

from __future__ import annotations

from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.core.tree import Draw
from draftree.core.types import MAX_NODES
from draftree.drafters.base import DraftContext, DraftTraits, SequenceDrafter, SequenceView


class ChainDrafter(SequenceDrafter[SequenceView]):
    """Drafter of chains of at most `k` tokens."""

    @classmethod
    def describe(cls, config: Any) -> DraftTraits:
        """Return the traits: one child per node."""
        return DraftTraits(draws=frozenset({Draw.FREE, Draw.POINT}), depth=config.k, nodes=config.k)

    def __init__(self, config: Any, context: DraftContext) -> None:
        self._config = config
        self._draw = context.draw

    def open(self, sequence: SequenceView) -> SequenceView:
        """Return the view of the sequence as state."""
        return sequence


def require_length(drafter: str, k: int) -> None:
    """Check that a chain has at least one token and fits in a pass.

    Raises:
        ConfigurationError: `k` is out of range.
    """
    if not 1 <= k <= MAX_NODES:
        raise ConfigurationError(f"option k of drafter '{drafter}' is {k}: it must be from 1 to {MAX_NODES}")
