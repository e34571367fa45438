"""Several drafters beside each other: every sequence drafts with the one that its request chose, or with none.

The drafters share the batch, the target's pass and the verifier. A state of one drafter is never given to another:
where a cached prefix has a state of another drafter, a new state is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from draftree.core.clock import SYSTEM_CLOCK, Clock
from draftree.core.hidden import layers_of
from draftree.core.routing import PLAIN, Routed, rows_by_choice
from draftree.core.tree import EMPTY, TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import Drafter, DraftTraits, Observation, SequenceView
from draftree.models.memory import Footprint, total


@final
class RoutedDrafter(Drafter[Routed]):
    """Gives each sequence to one of several drafters.

    Args:
        drafters: the drafters.
        index: the drafter of every name that a request can choose, or `PLAIN`.
        traits: of each drafter.
        num_parts: how many drafters each one merges.
        clock: clock of `part_seconds`: the parts of all drafters, one drafter after the other.
    """

    class Config:
        """A wrapper has no options of its own."""

    def __init__(
        self,
        drafters: Sequence[Drafter[Any]],
        index: Mapping[str, int],
        *,
        traits: Sequence[DraftTraits],
        num_parts: Sequence[int],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._drafters = list(drafters)
        self._index = dict(index)
        self._num_parts = list(num_parts)
        self._clock = clock
        whole = self.describe(traits)
        self._strips_picks = [whole.wants_picks and not own.wants_picks for own in traits]
        self._columns = [
            None if own.features == whole.features else [whole.features.index(layer) for layer in own.features]
            for own in traits
        ]

    @classmethod
    def describe(cls, config: Sequence[DraftTraits]) -> DraftTraits:
        """What the loop must provide so that each drafter gets what it needs."""
        return DraftTraits(
            draws=frozenset().union(*(own.draws for own in config)),
            depth=max(own.depth for own in config),
            nodes=max(own.nodes for own in config),
            branches=any(own.branches for own in config),
            gives_confidence=all(own.gives_confidence for own in config),
            works_ahead=any(own.works_ahead for own in config),
            runs_model=any(own.runs_model for own in config),
            reads_sources=all(own.reads_sources for own in config if own.runs_model),
            reads_predictions=any(own.reads_predictions for own in config),
            reads_grammars=any(own.reads_grammars for own in config),
            wants_picks=any(own.wants_picks for own in config),
            features=tuple(dict.fromkeys(layer for own in config for layer in own.features)),
            learns=any(own.learns for own in config),
        )

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room in all drafters: every sequence may choose any of them."""
        for drafter in self._drafters:
            drafter.reserve(num_sequences, length)

    @property
    def footprint(self) -> Footprint:
        """Of all drafters together, since each reserves room for all sequences."""
        return total(drafter.footprint for drafter in self._drafters)

    def open(self, sequence: SequenceView) -> Routed:
        """A state of the chosen drafter."""
        choice = self._index[sequence.draft]
        return Routed(choice, None if choice == PLAIN else self._drafters[choice].open(sequence))

    def fork(self, state: Routed, sequence: SequenceView, length: int) -> Routed:
        """A fork of a state of the same drafter, or a new state."""
        choice = self._index[sequence.draft]
        if choice == PLAIN or choice != state.choice:
            return self.open(sequence)
        return Routed(choice, self._drafters[choice].fork(state.own, sequence, length))

    def detach(self, state: Routed, length: int) -> Routed | None:
        """Keep what the drafter keeps."""
        own = None if state.choice == PLAIN else self._drafters[state.choice].detach(state.own, length)
        return None if own is None else Routed(state.choice, own)

    def attach(self, state: Routed, sequence: SequenceView, length: int) -> Routed:
        """Attach a state of the same drafter, or close it and open a new one."""
        choice = self._index[sequence.draft]
        if choice == state.choice:
            return Routed(choice, self._drafters[choice].attach(state.own, sequence, length))
        self.close(state)
        return self.open(sequence)

    def draft(self, states: Sequence[Routed], budgets: Sequence[Budget]) -> list[TokenTree]:
        """The trees of each drafter for its sequences."""
        trees = [EMPTY] * len(states)
        seconds: list[tuple[float, ...]] = [(0.0,) * count for count in self._num_parts]
        for choice, rows in rows_by_choice(states).items():
            drafter = self._drafters[choice]
            start = self._clock() if len(seconds) > 1 else 0.0
            found = drafter.draft([states[row].own for row in rows], [budgets[row] for row in rows])
            if len(seconds) > 1:
                whole = (self._clock() - start, *seconds[choice][1:])
                seconds[choice] = drafter.part_seconds or whole
            for row, tree in zip(rows, found, strict=True):
                trees[row] = tree
        if len(seconds) > 1:
            self.part_seconds = tuple(second for own in seconds for second in own)
        else:
            self.part_seconds = self._drafters[0].part_seconds
        return trees

    def observe(self, observations: Sequence[Observation[Routed]]) -> None:
        """Tell every drafter what the pass brought for its sequences."""
        for choice, rows in rows_by_choice([observation.state for observation in observations]).items():
            self._drafters[choice].observe([self._own(choice, observations[row]) for row in rows])

    def _own(self, choice: int, whole: Observation[Routed]) -> Observation[Any]:
        verdict, hidden, columns = whole.verdict, whole.hidden, self._columns[choice]
        if verdict is not None and self._strips_picks[choice]:
            verdict = replace(verdict, picks=())
        if hidden is not None and columns is not None:
            hidden = layers_of(hidden, columns) if columns else None
        return Observation(whole.state.own, whole.tokens_read, whole.tree, verdict, hidden)

    @property
    def note(self) -> str:
        """What the drafters decided."""
        return "; ".join(drafter.note for drafter in self._drafters if drafter.note)

    def close(self, state: Routed) -> None:
        """Close the drafter's state."""
        if state.choice != PLAIN:
            self._drafters[state.choice].close(state.own)

    def check_integrity(self, states: Sequence[Routed]) -> None:
        """Check every drafter."""
        for choice, drafter in enumerate(self._drafters):
            drafter.check_integrity([state.own for state in states if state.choice == choice])

    def forget(self) -> None:
        """Let every drafter forget."""
        for drafter in self._drafters:
            drafter.forget()
