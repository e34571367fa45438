"""Draft seam: a drafter proposes a token tree for every sequence of a batch.

A drafter holds weights and configuration. State of one sequence is in the object that `open` returns and the engine
keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.registry import NoOptions
from draftree.core.tree import EMPTY, Draw, TokenTree
from draftree.core.types import MAX_NODES, Budget, DraftPart, Verdict
from draftree.drafters.learning.store import LearningStore
from draftree.models.base import LanguageModel, Slot
from draftree.models.memory import NOTHING, Footprint
from draftree.models.source import Source
from draftree.sampling.controls import Controls
from draftree.sampling.history import History
from draftree.text.tokenizer import Tokenizer

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class SequenceView:
    """View of a sequence for drafters.

    Attributes:
        history: the written tokens, read only.
        controls: controls of the request.
        slot: the target's slot, for drafters that run a part of the target; None if there is no target.
        draft: name of the drafter that the request chose; empty for the default.
        owner: whose text it is, such as the name of an API key, for drafters that learn from texts; None for a text
            that drafters neither learn from nor draft with what they learned.
        source: token ids of the source of an encoder-decoder model; empty for causal models.
        encoded: the source itself, which may be of features; None for causal models.
    """

    history: History
    controls: Controls
    slot: Slot | None = None
    draft: str = ""
    owner: str | None = ""
    source: tuple[int, ...] = ()
    encoded: Source | None = None


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """Draft model and its tokenizer, if it has one."""

    model: LanguageModel
    tokenizer: Tokenizer | None
    name: str


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Arguments for building a drafter.

    Attributes:
        target: the target model.
        tokenizer: the target's tokenizer; None if it has none.
        draw: how children must be drawn, as agreed with the verifier.
        shares_noise: whether candidates are ranked with the request's noise; otherwise with another stream.
        load_model: loads the model that a spec names; the keyword `quantization` sets the kind of its weights, which
            are as the target's otherwise.
        place: index among merged drafters that draw from a distribution, from 0; each has its own noise.
        learning: store of what is learned from verified texts; None unless learning is requested.
        load_apart: loads the model that a spec names in a process of its own; None if that is not possible.
    """

    target: LanguageModel
    tokenizer: Tokenizer | None
    draw: Draw
    shares_noise: bool
    load_model: Callable[..., LoadedDraftModel]
    place: int = 0
    learning: LearningStore | None = None
    load_apart: Callable[..., LoadedDraftModel] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTraits:
    """Static facts of a configured drafter, available before weights are loaded.

    Attributes:
        draws: supported draws of children; the verifier chooses one.
        depth: maximum number of levels, and the depth if the planner sets none.
        nodes: number of nodes of a tree of that depth; more than the depth if it branches.
        branches: whether a node may have two children.
        gives_confidence: whether it estimates token probabilities and stops below `Budget.min_confidence`.
        is_calibrated: whether its scores are fitted to measured acceptance; it then stops below `Budget.min_survival`.
        greedy_rates: acceptance of each level given that the level before was accepted, measured on greedy texts before
            it was loaded, such as by its training; empty if unknown.
        sampled_rates: the same for texts sampled with a temperature.
        works_ahead: whether nodes are drafted for their picks and not for acceptance; planners that maximize
            acceptance would cut them.
        runs_model: whether drafting runs passes of a model.
        reads_sources: whether the models that it runs read the source of an encoder-decoder target.
        reads_predictions: whether it drafts from the prediction of a request.
        reads_grammars: whether it drafts from the grammar of a request only.
        wants_picks: whether verdicts passed to `observe` must have the target's pick at every node.
        features: hidden states of the target that `observe` needs, in this order: index l is the residual stream that
            enters layer l, and the number of layers, or -1, is the output of the last layer before the final norm.
        learns: whether it can learn from verified texts (`DraftContext.learning`).
        ahead: number of places of a tree after which it drafts while the target verifies; 0 for none.
    """

    draws: frozenset[Draw]
    depth: int
    nodes: int
    branches: bool = False
    gives_confidence: bool = False
    is_calibrated: bool = False
    greedy_rates: tuple[float, ...] = ()
    sampled_rates: tuple[float, ...] = ()
    works_ahead: bool = False
    runs_model: bool = False
    reads_sources: bool = False
    reads_predictions: bool = False
    reads_grammars: bool = False
    wants_picks: bool = False
    features: tuple[int, ...] = ()
    learns: bool = False
    ahead: int = 0

    def part(self, name: str) -> DraftPart:
        """Return the facts that a planner needs."""
        return DraftPart(
            name,
            self.depth,
            self.nodes,
            self.runs_model,
            self.gives_confidence,
            self.is_calibrated,
            self.greedy_rates,
            self.sampled_rates,
        )


NO_DRAFTS = DraftTraits(draws=frozenset(), depth=0, nodes=0)
"""Traits of plain decoding."""


@dataclass(frozen=True, slots=True)
class Observation(Generic[State]):
    """Result of one pass of the target for one sequence.

    Attributes:
        state: state of the sequence.
        tokens_read: text tokens that the target read in this pass: a prompt chunk, or the tokens before the tree with
            the root.
        tree: the drafted tree; empty for a prompt chunk.
        verdict: verdict on `tree`; None for a prompt chunk.
        hidden: hidden states of the tokens added to the target's slot, those read and then the accepted path, shape
            (tokens, layers, hidden) with the layers in `DraftTraits.features`; None if it is empty.
    """

    state: State
    tokens_read: int
    tree: TokenTree = EMPTY
    verdict: Verdict | None = None
    hidden: Tensor | None = None


class Drafter(Generic[State]):
    """Drafter: proposes token trees. Built as `cls(config, context)`.

    A subclass has a frozen dataclass `Config` if it has options, and implements `draft_one`. All else has defaults.
    """

    Config: ClassVar[type] = NoOptions
    _note = ""
    part_seconds: tuple[float, ...] = ()
    """Costs of each part in the last `draft`, set by drafters that combine several."""

    @classmethod
    def describe(cls, config: Any) -> DraftTraits:
        """Return the traits of this configuration; called before weights are loaded.

        The default is that of a drafter that copies or computes chains of at most `config.k` tokens.
        """
        return DraftTraits(draws=frozenset({Draw.FREE, Draw.POINT}), depth=config.k, nodes=config.k)

    def __init__(self, config: Any, context: DraftContext) -> None:
        self._config = config
        self._draw = context.draw

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room for `num_sequences` open sequences of `length` tokens."""

    @property
    def footprint(self) -> Footprint:
        """Memory of its own models in bytes; zero for a drafter without one."""
        return NOTHING

    def open(self, sequence: SequenceView) -> State:
        """Return the state of a new sequence; by default the view, for drafters that keep nothing else."""
        return cast(State, sequence)

    def draft(self, states: Sequence[State], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Return a tree for every sequence, within its budget; an empty tree is always allowed.

        A drafter that runs a model overrides this to draft for the whole batch in one pass.
        """
        return [self.draft_one(state, budget) for state, budget in zip(states, budgets, strict=True)]

    def draft_one(self, state: State, budget: Budget) -> TokenTree:
        """Return a tree for one sequence."""
        raise NotImplementedError(f"{type(self).__name__} must implement draft_one, or draft for whole batches")

    def observe(self, observations: Sequence[Observation[State]]) -> None:
        """Learn from a pass of the target: from rounds, and from prompt chunks, whose verdict is None.

        Histories already contain the tokens that a round wrote. A round that ends a text is not observed.
        """

    def fork(self, state: State, sequence: SequenceView, length: int) -> State:
        """Return a state for a new sequence with the same first `length` tokens; the old state is unchanged."""
        return self.open(sequence)

    def detach(self, state: State, length: int) -> State | None:
        """Convert the state of a finished sequence for a cached prefix of its first `length` tokens.

        Returns:
            A state for later calls of `fork` and `attach`; None if the state was closed.
        """
        self.close(state)
        return None

    def attach(self, state: State, sequence: SequenceView, length: int) -> State:
        """Do as `fork`, and consume the detached state."""
        forked = self.fork(state, sequence, length)
        self.close(state)
        return forked

    def check_integrity(self, states: Sequence[State]) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself; between rounds only.

        Args:
            states: all open states, detached ones included.
        """

    @property
    def note(self) -> str:
        """Message for the user about decisions during construction; empty if none."""
        return self._note

    def close(self, state: State) -> None:
        """Free the resources of a sequence."""

    def release(self, part: int) -> DraftTraits:
        """Free one of several merged drafters, also in open sequences; returns the traits of the rest."""
        raise NotImplementedError(f"{type(self).__name__} merges no drafters")

    def forget(self) -> None:
        """Drop everything learned from earlier requests; open sequences are unchanged."""


def require_range(drafter: str, config: object, *names: str, least: float = 1, most: float = MAX_NODES) -> None:
    """Raise ConfigurationError for options that are out of range, by default as numbers of nodes of a pass."""
    for name in names:
        value = getattr(config, name)
        if not least <= value <= most:
            raise ConfigurationError(
                f"option {name} of drafter '{drafter}' is {value:g}: it must be from {least:g} to {most:g}"
            )
