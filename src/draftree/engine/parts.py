"""The parts of one engine, and the check that they fit together, before any weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draftree.core.clock import SYSTEM_CLOCK, Clock
from draftree.core.errors import ConfigurationError
from draftree.core.tree import Draw
from draftree.drafters import NO_DRAFT
from draftree.drafters.base import NO_DRAFTS, Drafter, DraftTraits
from draftree.engine.sinks import StateSink
from draftree.models.base import LanguageModel
from draftree.planners.base import Planner
from draftree.verifiers.base import Promise, Verifier

PREFERENCE = (Draw.FREE, Draw.POINT, Draw.WITHOUT_REPLACEMENT, Draw.IID)
"""Draws in order from the least to the most restrictive for a drafter."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a round. Without a drafter it is plain decoding."""

    target: LanguageModel
    verifier: Verifier
    planner: Planner[Any]
    drafter: Drafter[Any] | None = None
    traits: DraftTraits = NO_DRAFTS
    """Of the drafter."""
    clock: Clock = SYSTEM_CLOCK
    """Clock of the records."""
    choices: Mapping[str, DraftTraits] = field(default_factory=dict)
    """Traits of the drafters that a request can choose, the default first; empty if there is no choice."""
    sink: StateSink | None = None
    """Receives hidden states of every token; prompts are then read without cached or shared prefixes."""

    def __post_init__(self) -> None:
        assert (self.drafter is None) == (self.traits is NO_DRAFTS), "a drafter comes with its traits"

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose input the drafter needs, in its order, counted from 0; see `LayerRange.capture`."""
        return tuple(layer if layer >= 0 else self.target.num_layers + 1 + layer for layer in self.traits.features)

    @property
    def capture(self) -> tuple[int, ...]:
        """Layers whose hidden states a pass of the target must return: ascending, each once."""
        own = () if self.sink is None else self.sink.layers
        return tuple(sorted({*self.feature_layers, *own}))

    def traits_of(self, draft: str) -> DraftTraits:
        """Return the traits of a drafter by the name that a request chose; empty for the default."""
        if draft == NO_DRAFT:
            return NO_DRAFTS
        return self.choices[draft] if draft else next(iter(self.choices.values()), self.traits)

    def promise(self, temperature: float, draft: str = "") -> Promise:
        """Return the relation of texts at this temperature to plain decoding."""
        kept = self.verifier.promise(temperature)
        # without drafts a lossy verifier accepts nothing, and writes the target's own picks
        return Promise.SAME_TEXT if kept is Promise.LOSSY and self.traits_of(draft) is NO_DRAFTS else kept


def agree(
    drafter: str, draws: frozenset[Draw], verifier: str, accepts: frozenset[Draw], *, wants_distributions: bool = False
) -> Draw:
    """Return the least restrictive common draw; with `wants_distributions` one with a distribution, if there is one.

    Raises:
        ConfigurationError: there is no common draw.
    """
    for draw in reversed(PREFERENCE) if wants_distributions else PREFERENCE:
        if draw in draws and draw in accepts:
            return draw
    gives, takes = (", ".join(sorted(draw.value for draw in side)) for side in (draws, accepts))
    raise ConfigurationError(
        f"drafter '{drafter}' supplies {gives} draws, but verifier '{verifier}' accepts {takes}: "
        "use verifier 'coupled', which accepts all, or another drafter"
    )
