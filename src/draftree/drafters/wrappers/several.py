"""Common parts of drafters that combine several others: resources, traits, and the observations of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from draftree.core.clock import Clock
from draftree.core.hidden import layers_of
from draftree.core.tree import Draw
from draftree.core.types import Verdict
from draftree.drafters.base import Drafter, DraftTraits
from draftree.models.memory import Footprint, total

State = TypeVar("State")


class SeveralDrafters(Drafter[State]):
    """Base class of drafters that combine several others.

    Args:
        drafters: the others.
        traits: of each.
        clock: clock of `part_seconds`.
    """

    class Config:
        """A wrapper has no options of its own."""

    def __init__(self, drafters: Sequence[Drafter[Any]], traits: Sequence[DraftTraits], clock: Clock) -> None:
        self._drafters = list(drafters)
        self._traits = list(traits)
        self._clock = clock
        self._features = self.describe(traits).features

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room in all drafters, each for all sequences."""
        for drafter in self._drafters:
            drafter.reserve(num_sequences, length)

    @property
    def footprint(self) -> Footprint:
        """Of all drafters together."""
        return total(drafter.footprint for drafter in self._drafters)

    @property
    def note(self) -> str:
        """The notes of all drafters."""
        return "; ".join(drafter.note for drafter in self._drafters if drafter.note)

    def forget(self) -> None:
        """Drop what any drafter learned from earlier requests."""
        for drafter in self._drafters:
            drafter.forget()

    def own_verdict(self, index: int, verdict: Verdict | None) -> Verdict | None:
        """Return a verdict with the target's picks only if one drafter's traits ask for them."""
        if verdict is None or not verdict.picks or self._traits[index].wants_picks:
            return verdict
        return replace(verdict, picks=())

    def own_hidden(self, index: int, hidden: Tensor | None) -> Tensor | None:
        """Return the hidden states of the layers that one drafter's traits name; None if it needs none."""
        features = self._traits[index].features
        if hidden is None or not features:
            return None
        return layers_of(hidden, [self._features.index(layer) for layer in features])


def combined_traits(
    traits: Sequence[DraftTraits], *, draws: frozenset[Draw], nodes: int, branches: bool
) -> DraftTraits:
    """Return the traits of several drafters together; the arguments are those that depend on how they are combined."""
    return DraftTraits(
        draws=draws,
        depth=max(own.depth for own in traits),
        nodes=nodes,
        branches=branches,
        gives_confidence=all(own.gives_confidence for own in traits),
        works_ahead=any(own.works_ahead for own in traits),
        runs_model=any(own.runs_model for own in traits),
        reads_sources=all(own.reads_sources for own in traits if own.runs_model),
        reads_predictions=any(own.reads_predictions for own in traits),
        reads_grammars=any(own.reads_grammars for own in traits),
        wants_picks=any(own.wants_picks for own in traits),
        features=tuple(dict.fromkeys(layer for own in traits for layer in own.features)),
        learns=any(own.learns for own in traits),
        alternates=any(own.alternates for own in traits),
    )
