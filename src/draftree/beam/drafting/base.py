"""Draft seam of a beam search, and the depth of drafts.

A draft is a token tree after a live beam. One pass of the model scores the newest token of every beam and all drafted
nodes. Then ordinary steps are made as long as the beams that they need are scored. Drafts change the number of passes,
and no step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftree.core.errors import InvalidRequestError
from draftree.core.tree import TokenTree
from draftree.models.base import LanguageModel

if TYPE_CHECKING:
    from draftree.beam.forest import Forest
    from draftree.beam.group import Beam
    from draftree.beam.params import BeamSearchParams
    from draftree.beam.scoring import SearchStats
    from draftree.beam.state import TextSearch

MAX_NODES = 128
"""Maximum number of drafted nodes of a text that one pass scores."""
MAX_DEPTH = 8
"""Maximum number of drafted levels."""
PATIENCE = 3
"""Failed drafts in a row after which drafting pauses."""
LONGEST_PAUSE = 16

Draft = tuple["Beam", TokenTree]
"""A live beam and the tree after it."""


class BeamDrafter(ABC):
    """Drafter of a beam search. Has state for each text."""

    def start(self, text: TextSearch, *, capacity: int, length: int) -> None:  # noqa: B027
        """Prepare for a text.

        Args:
            text: the search, before its first pass.
            capacity: maximum number of live nodes in one slot.
            length: expected maximum number of tokens in a slot.
        """

    def forests(self, text: TextSearch) -> Sequence[Forest]:
        """Return its own trees of a text, which follow the live beams; empty without a model."""
        return ()

    @abstractmethod
    def propose(self, depths: Mapping[TextSearch, int], stats: SearchStats) -> list[list[Draft]]:
        """Return drafts for each text.

        Args:
            depths: maximum number of levels for each text, at least 1.
            stats: passes of a draft model are counted here.
        """

    def finish(self, text: TextSearch) -> None:  # noqa: B027
        """Free what belongs to a text; may be called twice."""


@dataclass(slots=True)
class Pace:
    """Depth of the next draft of a text: twice as deep after success, less after failure, and none for some passes.

    Attributes:
        depth: levels of the next draft.
        failures: drafts in a row after which no further step was possible.
        pause: passes without a draft.
        is_drafting: whether the last pass scored drafted nodes.
    """

    depth: int = 4
    failures: int = 0
    pause: int = 0
    is_drafting: bool = False

    def next_depth(self) -> int:
        """Return the levels of the next draft; 0 during a pause."""
        if self.pause:
            self.pause -= 1
            return 0
        return self.depth

    def note(self, steps: int) -> None:
        """Record how many steps the last pass made possible."""
        if not self.is_drafting:
            return
        if steps > 1:
            self.failures = 0
            self.depth = min(MAX_DEPTH, 2 * self.depth) if steps > self.depth else max(2, steps)
            return
        self.failures += 1
        self.depth = max(1, self.depth // 2)
        if self.failures >= PATIENCE:
            self.pause = min(LONGEST_PAUSE, 2 ** (self.failures - PATIENCE))


def require_draftable(model: LanguageModel, params: BeamSearchParams) -> None:
    """Check that drafts can be scored, and that a score bounds the continuations of a beam.

    Raises:
        InvalidRequestError: the message names the parameter.
    """
    for name in ("unk_penalty", "diversity_penalty", "sibling_penalty", "lm_weight"):
        if getattr(params, name) < 0:
            raise InvalidRequestError(
                f"{name}={getattr(params, name)} can raise the score of a text, so no score bounds what follows a "
                f"beam, and drafts cannot be used: set {name} to 0 or more, or draft to 'none'",
                param=name,
            )
    for name, models in (("draft", [model]), ("models", params.models), ("lm_model", [params.lm_model])):
        if any(one is not None and not one.supports_trees for one in models):
            raise InvalidRequestError(
                f"{name}: a model accepts chains only, and drafts of several beams are a tree: set draft to 'none'",
                param=name,
            )
