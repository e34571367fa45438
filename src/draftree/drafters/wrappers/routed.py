"""Several drafters beside each other: every sequence drafts with the one that its request chose, or with none.

The drafters share the batch, the target's pass and the verifier. A state of one drafter is never given to another:
where a cached prefix has a state of another drafter, a new state is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from draftree.core.clock import SYSTEM_CLOCK, Clock
from draftree.core.routing import PLAIN, Routed, rows_by_choice
from draftree.core.tree import EMPTY, TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import Drafter, DraftTraits, Observation, SequenceView
from draftree.drafters.wrappers.several import SeveralDrafters, combined_traits


@final
class RoutedDrafter(SeveralDrafters[Routed]):
    """Gives each sequence to one of several drafters.

    Args:
        drafters: the drafters.
        index: the drafter of every name that a request can choose, or `PLAIN`.
        traits: of each drafter.
        num_parts: how many drafters each one merges.
        clock: clock of `part_seconds`: the parts of all drafters, one drafter after the other.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter[Any]],
        index: Mapping[str, int],
        *,
        traits: Sequence[DraftTraits],
        num_parts: Sequence[int],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(drafters, traits, clock)
        self._index = dict(index)
        self._num_parts = list(num_parts)

    @classmethod
    def describe(cls, config: Sequence[DraftTraits]) -> DraftTraits:
        """The traits of all drafters together: the loop provides for each of them."""
        return combined_traits(
            config,
            draws=frozenset().union(*(own.draws for own in config)),
            nodes=max(own.nodes for own in config),
            branches=any(own.branches for own in config),
        )

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
        verdict, hidden = self.own_verdict(choice, whole.verdict), self.own_hidden(choice, whole.hidden)
        return Observation(whole.state.own, whole.tokens_read, whole.tree, verdict, hidden)

    def close(self, state: Routed) -> None:
        """Close the drafter's state."""
        if state.choice != PLAIN:
            self._drafters[state.choice].close(state.own)

    def check_integrity(self, states: Sequence[Routed]) -> None:
        """Check every drafter."""
        for choice, drafter in enumerate(self._drafters):
            drafter.check_integrity([state.own for state in states if state.choice == choice])
