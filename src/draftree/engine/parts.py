"""The parts of an engine, and the check that they fit together before any weights are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.core.tree import Draw
from draftree.drafters.base import NO_DRAFTS, DraftTraits
from draftree.engine.sequence import DraftChoice, WritingSequence
from draftree.models.base import LanguageModel
from draftree.options import NO_DRAFT
from draftree.verifiers.base import Guarantee, Verifier


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of a pass that belong to successive tokens of one text.

    Attributes:
        sequence: the text; it may have ended with this pass.
        start: index of the first token in the text, prompt included.
        rows: rows of the pass, one per token.
    """

    sequence: WritingSequence
    start: int
    rows: Sequence[int]


class StateSink(ABC):
    """Receives hidden states with every pass of the target.

    A text of n tokens has states of its first n - 1 tokens: the target never reads the last one. Texts that fail
    have none from then on. A preempted text is read again from its first token.
    """

    layers: tuple[int, ...]
    """Layers whose input is captured, counted from 0; the number of layers selects the output of the last one."""

    @abstractmethod
    def take(self, hidden: Tensor, texts: Sequence[StateRows]) -> None:
        """Receive the states of one pass.

        Args:
            hidden: states of all rows, shape (rows, layers, hidden) with the layers in the order of `layers`; valid
                during the call only.
            texts: rows of each text.
        """


PREFERENCE = (Draw.FREE, Draw.POINT, Draw.WITHOUT_REPLACEMENT, Draw.IID)
"""Draws in order from the least to the most restrictive for a drafter."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of a round. Without a drafter it is plain decoding."""

    target: LanguageModel
    verifier: Verifier
    choices: Mapping[str, DraftChoice | None] = field(default_factory=dict)
    """Drafters by the names that requests choose, the default first; None for plain decoding."""
    clock: Clock = SYSTEM_CLOCK  # clock of the records
    sink: StateSink | None = None
    """Receives hidden states of every token; prompts are then read without cached or shared prefixes."""

    @property
    def drafters(self) -> list[DraftChoice]:
        """Loaded drafters, the default first."""
        return [choice for choice in self.choices.values() if choice is not None]

    def choice(self, draft: str) -> DraftChoice | None:
        """Return the drafter that a request chose, by its name; empty for the default. None for plain decoding."""
        if draft == NO_DRAFT:
            return None
        return self.choices[draft] if draft else next(iter(self.choices.values()), None)

    def feature_layers(self, traits: DraftTraits) -> list[int]:
        """Layers whose input a drafter needs, in its order, counted from 0; see `LayerRange.capture`."""
        return [layer if layer >= 0 else self.target.num_layers + 1 + layer for layer in traits.features]

    @property
    def capture(self) -> tuple[int, ...]:
        """Layers whose hidden states a pass of the target must return: ascending, each once."""
        sunk = () if self.sink is None else self.sink.layers
        return tuple(
            sorted({*sunk, *(layer for choice in self.drafters for layer in self.feature_layers(choice.traits))})
        )

    def traits_of(self, draft: str) -> DraftTraits:
        """Return the traits of the drafter that a request chose; empty for the default."""
        choice = self.choice(draft)
        return NO_DRAFTS if choice is None else choice.traits

    def promise(self, temperature: float, draft: str = "") -> Guarantee:
        """Return the relation of texts at this temperature to plain decoding."""
        kept = self.verifier.promise(temperature)
        # without drafts a lossy verifier accepts nothing, and writes the target's own picks
        return Guarantee.SAME_TEXT if kept is Guarantee.LOSSY and self.traits_of(draft) is NO_DRAFTS else kept


def require_picks(target: LanguageModel, verifier: Verifier, traits: DraftTraits) -> None:
    """Refuse methods that need more of a target than final picks, if it returns nothing else."""
    if not target.applies_controls:
        return
    if not verifier.follows_picks:
        name = type(verifier).__name__.lower()
        raise ConfigurationError(
            f"verifier '{name}' was chosen, but this target verifies drafts itself and returns accepted tokens: use "
            "verifier 'coupled'"
        )
    if traits.wants_picks or (traits.features and not target.returns_states):
        needed = "the target's picks beside the accepted path" if traits.wants_picks else "the target's hidden states"
        raise ConfigurationError(
            f"this drafter needs {needed}, and this target returns the accepted tokens only: use 'suffix', 'ngram' or "
            "'model:NAME'"
        )


def agree(drafter: str, traits: DraftTraits, verifier: str, rule: type[Verifier]) -> Draw:
    """Return the least restrictive draw that drafter and rule have in common; if the rule can use distributions, one
    with a distribution if there is one.
    """
    order = reversed(PREFERENCE) if rule.wants_distributions else PREFERENCE
    draw = next((draw for draw in order if draw in traits.draws and draw in rule.accepts), None)
    if draw is None:
        gives, takes = (", ".join(sorted(draw.value for draw in side)) for side in (traits.draws, rule.accepts))
        raise ConfigurationError(
            f"drafter '{drafter}' supplies {gives} draws, but verifier '{verifier}' accepts {takes}: "
            "use verifier 'coupled', which accepts all, or another drafter"
        )
    if rule.chains_only and traits.branches:
        raise ConfigurationError(
            f"drafter '{drafter}' drafts trees with branches, but verifier '{verifier}' accepts chains only: "
            "draft a chain, or use verifier 'coupled', 'multistep', 'recursive' or 'traversal'"
        )
    return draw
