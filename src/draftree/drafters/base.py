"""The draft seam: a drafter guesses a token tree for every sequence of a batch.

A drafter holds weights and configuration. What it knows about one sequence lies in the state that `open` gives
and the engine keeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from draftree.core.tree import EMPTY, Draw, TokenTree
from draftree.core.types import Budget, Verdict
from draftree.drafters import DRAFTERS
from draftree.models.base import LanguageModel, Slot
from draftree.models.memory import NOTHING, Footprint
from draftree.sampling.controls import Controls
from draftree.sampling.history import History
from draftree.text.tokenizer import Tokenizer

__all__ = [
    "DRAFTERS",
    "NO_DRAFTS",
    "DraftContext",
    "DraftTraits",
    "Drafter",
    "LoadedDraftModel",
    "Observation",
    "SequenceDrafter",
    "SequenceView",
]

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What a drafter sees of a sequence.

    Attributes:
        history: the written tokens, read only.
        controls: of the request.
        slot: the target's, for drafters that run a part of the target; None where there is no target.
        draft: name of the drafter that the request chose; empty for the default.
    """

    history: History
    controls: Controls
    slot: Slot | None = None
    draft: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTraits:
    """Static facts of a configured drafter, known before anything is loaded.

    Attributes:
        draws: how it can draw children; the verifier decides where there is a choice.
        depth: levels of its trees at most, and where the planner sets no depth.
        nodes: nodes of a tree of that depth; more than the depth if it branches.
        branches: whether a node may have two children.
        gives_confidence: whether it estimates how likely a token is, and stops below `Budget.min_confidence`.
        works_ahead: whether nodes are drafted to be scored rather than accepted; planners that weigh acceptance would
            cut them.
        runs_model: whether drafting runs passes of a model.
        reads_predictions: whether it drafts from the text that a request predicts.
        reads_grammars: whether it drafts from the grammar of a request only.
        wants_picks: whether verdicts given to `observe` must name the target's pick at every node.
        features: hidden states of the target that `observe` needs, in this order: index l is the residual stream that
            enters layer l, and the number of layers, or -1, is the output of the last layer before the final norm.
    """

    draws: frozenset[Draw]
    depth: int
    nodes: int
    branches: bool = False
    gives_confidence: bool = False
    works_ahead: bool = False
    runs_model: bool = False
    reads_predictions: bool = False
    reads_grammars: bool = False
    wants_picks: bool = False
    features: tuple[int, ...] = ()


NO_DRAFTS = DraftTraits(draws=frozenset(), depth=0, nodes=0)
"""Traits of plain decoding."""


@dataclass(frozen=True, slots=True)
class Observation(Generic[State]):
    """What one pass of the target brought for one sequence.

    Attributes:
        state: of the sequence.
        tokens_read: text tokens that the target read in this pass: those of a prompt chunk, or those before the tree,
            the root included.
        tree: as it was drafted; empty if nothing was, and for a prompt chunk.
        verdict: on `tree`; None for a prompt chunk.
        hidden: hidden states of the tokens that the target's slot gained, those read and then the accepted path, shape
            (tokens, layers, hidden) with the layers that `DraftTraits.features` names; None if it names none.
    """

    state: State
    tokens_read: int
    tree: TokenTree = EMPTY
    verdict: Verdict | None = None
    hidden: Tensor | None = None


class Drafter(ABC, Generic[State]):
    """Guesses ahead. Built as `cls(config, context)`."""

    Config: ClassVar[type]
    part_seconds: tuple[float, ...] = ()
    """What each part took in the last `draft`, for a drafter that is made of several; an instance sets it."""

    @classmethod
    @abstractmethod
    def describe(cls, config: Any) -> DraftTraits:
        """Static facts of this configuration; called before weights are loaded."""

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

    def observe(self, observations: Sequence[Observation[State]]) -> None:
        """Learn what a pass of the target brought: of rounds, and of prompt chunks, whose verdict is None.

        The histories already hold the tokens that a round wrote. A round that ends a text is not observed.
        """

    def fork(self, state: State, sequence: SequenceView, length: int) -> State:
        """State for a new sequence whose text begins with the same `length` tokens; the old state stays as it is."""
        return self.open(sequence)

    def detach(self, state: State, length: int) -> State | None:
        """Give up a finished sequence, for a cached prefix of its first `length` tokens.

        Returns:
            What `fork` and `attach` can start from later; None if nothing is kept, and the state is closed.
        """
        self.close(state)
        return None

    def attach(self, state: State, sequence: SequenceView, length: int) -> State:
        """As `fork`, from a detached state that is not needed any more."""
        forked = self.fork(state, sequence, length)
        self.close(state)
        return forked

    def check_integrity(self, states: Sequence[State]) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself; between rounds only.

        Args:
            states: all that are open, the detached ones included.
        """

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
