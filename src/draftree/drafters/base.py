"""The draft seam: a drafter guesses a token tree for every sequence of a batch.

A drafter holds weights and configuration. What it knows about one sequence lies in the state that `open` gives
and the engine keeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Budget, Verdict
from draftree.drafters import DRAFTERS
from draftree.models.base import LanguageModel, Slot
from draftree.models.memory import NOTHING, Footprint
from draftree.sampling.controls import Controls
from draftree.sampling.history import History
from draftree.text.tokenizer import Tokenizer

__all__ = ["DRAFTERS", "DraftContext", "Drafter", "LoadedDraftModel", "SequenceDrafter", "SequenceView"]

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What a drafter sees of a sequence.

    Attributes:
        history: the written tokens, read only.
        controls: of the request.
        slot: the target's, for drafters that run a part of the target; None where there is no target.
    """

    history: History
    controls: Controls
    slot: Slot | None = None


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """A model that a drafter steps, and its tokenizer (None where it has none)."""

    model: LanguageModel
    tokenizer: Tokenizer | None
    name: str


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What the front gives a drafter when it builds it.

    Attributes:
        target: the model whose text is wanted.
        tokenizer: the target's, None where it has none.
        draw: how children must be drawn, as agreed with the verifier.
        shares_noise: whether candidates are ranked with the request's own noise (else with another stream).
        load_model: loads the model that a spec names.
        place: of the drafter among the merged ones that draw from a distribution, from 0; each has noise of its own.
    """

    target: LanguageModel
    tokenizer: Tokenizer | None
    draw: Draw
    shares_noise: bool
    load_model: Callable[[str], LoadedDraftModel]
    place: int = 0


class Drafter(ABC, Generic[State]):
    """Guesses ahead. Built as `cls(config, context)`."""

    Config: ClassVar[type]
    reads_predictions: bool = False
    """Whether it drafts from the text that a request predicts; an instance may set it."""
    reads_grammars: ClassVar[bool] = False
    """Whether the grammar of a request is all that it drafts from."""
    part_seconds: tuple[float, ...] = ()
    """What each part took in the last `draft`, for a drafter that is made of several; an instance sets it."""
    wants_picks: bool = False
    """Whether verdicts given to `observe` name the target's pick at every node; an instance may set it."""

    runs_model: ClassVar[bool] = False
    """Whether drafting is passes of a model, and not bookkeeping."""

    @classmethod
    @abstractmethod
    def draws(cls, config: Any) -> frozenset[Draw]:
        """The draws that this configuration can give; known before weights are loaded."""

    @classmethod
    @abstractmethod
    def default_depth(cls, config: Any) -> int:
        """Tokens ahead that this configuration guesses where the planner does not say."""

    @classmethod
    def default_nodes(cls, config: Any) -> int:
        """Nodes of a tree of that depth; more than the depth if it branches."""
        return cls.default_depth(config)

    @classmethod
    def branches(cls, config: Any) -> bool:
        """Whether this configuration gives trees in which a node has two children."""
        return False

    @classmethod
    def gives_confidence(cls, config: Any) -> bool:
        """Whether it estimates how likely a token is, and stops below `Budget.min_confidence`."""
        return False

    @classmethod
    def works_ahead(cls, config: Any) -> bool:
        """Whether nodes are there to be scored rather than accepted: planners that judge by acceptance cut them."""
        return False

    @abstractmethod
    def __init__(self, config: Any, context: DraftContext) -> None: ...

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room for this many open sequences of this many tokens."""

    @property
    def footprint(self) -> Footprint:
        """Bytes that its own models take; nothing for a drafter that has none, or that uses the target's."""
        return NOTHING

    @abstractmethod
    def open(self, sequence: SequenceView) -> State:
        """State for a new sequence."""

    @abstractmethod
    def draft(self, states: Sequence[State], budgets: Sequence[Budget]) -> list[TokenTree]:
        """A tree for every sequence, within its budget; an empty tree is always allowed."""

    def observe(self, states: Sequence[State], trees: Sequence[TokenTree], verdicts: Sequence[Verdict]) -> None:
        """What became of the last trees. The histories already hold the written tokens."""

    @property
    def note(self) -> str:
        """What was decided when it was built and a user may want to know; empty if nothing was."""
        return ""

    def close(self, state: State) -> None:
        """Give back what a sequence held."""

    def forget(self) -> None:
        """Drop what was learned from earlier requests; open sequences stay as they are."""


class SequenceDrafter(Drafter[State]):
    """A drafter that thinks of one sequence at a time."""

    def draft(self, states: Sequence[State], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Draft one sequence after the other."""
        return [self.draft_one(state, budget) for state, budget in zip(states, budgets, strict=True)]

    @abstractmethod
    def draft_one(self, state: State, budget: Budget) -> TokenTree:
        """The tree of one sequence."""
