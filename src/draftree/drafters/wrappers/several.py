"""Several drafters as one: merged into one tree, or one of them for each sequence.

`MergedDrafter` merges the trees of its drafters into one tree, which is scored in one pass. Where the verifier reads no
draft distributions, common prefixes are shared and every node names all its sources. Where it does, each child keeps
the distribution that it was drawn from, and children drawn from a model come before copied ones (`core/node_map.py`): a
copied token that is tried first is often accepted where the model's draft would have gone further.

`RoutedDrafter` gives every sequence to the drafter that its request chose, or to none. The drafters share the batch,
the target's pass and the verifier. A state of one drafter is never given to another: where a cached prefix has a state
of another drafter, a new state is opened.

Source: merge-based tree construction of SpecInfer, arXiv 2305.09781, section 3; the order of children is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, final

from torch import Tensor

from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.core.node_map import NodeMap, first_levels, join, merge
from draftree.core.tensors import layers_of
from draftree.core.tree import EMPTY, Draw, TokenTree
from draftree.core.types import PLAIN, Budget, Routed, Verdict, rows_by_choice
from draftree.drafters.base import Drafter, DraftTraits, Observation, SequenceView
from draftree.models.memory import Footprint, total

State = TypeVar("State")


class SeveralDrafters(Drafter[State]):
    """Base class of drafters that combine several others.

    Args:
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
    )


@dataclass(slots=True)
class MergedSequence:
    """A sequence of merged drafters. Mutated by `MergedDrafter` only."""

    parts: list[Any]
    """A state for every part; None where a part keeps nothing of a finished sequence."""
    trees: list[TokenTree] = field(default_factory=list)
    """The last tree of every part; empty if nothing was drafted."""
    maps: list[NodeMap] = field(default_factory=list)
    """Where the nodes of these trees are in the merged tree."""


@final
class MergedDrafter(SeveralDrafters[MergedSequence]):
    """Merges the trees of several drafters, each drafted within the whole budget or its part of it.

    Args:
        drafters: in the order of the spec.
        clock: what `part_seconds` are read from.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter[Any]],
        names: Sequence[str],
        *,
        traits: Sequence[DraftTraits],
        draw: Draw,
        vocab_size: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(drafters, traits, clock)
        self._names = list(names)
        self._draw = draw
        self._vocab_size = vocab_size

    @classmethod
    def describe(cls, config: Sequence[DraftTraits]) -> DraftTraits:
        """Computed from the traits of the parts, which are all that there is to configure."""
        return combined_traits(
            config,
            draws=_common_draws([part.draws for part in config]),
            nodes=sum(part.nodes for part in config),
            branches=len(config) > 1 or config[0].branches,
        )

    def open(self, sequence: SequenceView) -> MergedSequence:
        """A state of every part."""
        return MergedSequence([drafter.open(sequence) for drafter in self._drafters])

    def fork(self, state: MergedSequence, sequence: SequenceView, length: int) -> MergedSequence:
        """A fork of every part."""
        pairs = zip(self._drafters, state.parts, strict=True)
        return MergedSequence([d.open(sequence) if own is None else d.fork(own, sequence, length) for d, own in pairs])

    def detach(self, state: MergedSequence, length: int) -> MergedSequence | None:
        """Keep the parts that keep something."""
        kept = [drafter.detach(own, length) for drafter, own in zip(self._drafters, state.parts, strict=True)]
        return None if all(own is None for own in kept) else MergedSequence(kept)

    def attach(self, state: MergedSequence, sequence: SequenceView, length: int) -> MergedSequence:
        """Attach the parts that kept something."""
        pairs = zip(self._drafters, state.parts, strict=True)
        return MergedSequence(
            [d.open(sequence) if own is None else d.attach(own, sequence, length) for d, own in pairs]
        )

    def draft(self, states: Sequence[MergedSequence], budgets: Sequence[Budget]) -> list[TokenTree]:
        """The merged trees, held to the budgets. Drafters without a model draft first: others depend on their trees."""
        parts: list[list[TokenTree]] = [[EMPTY] * len(states) for _ in self._drafters]
        seconds = [0.0] * len(parts)
        for index in sorted(range(len(parts)), key=lambda part: self._traits[part].runs_model):
            start = self._clock()
            parts[index] = self._draft_part(index, states, budgets, list(zip(*parts, strict=True)))
            seconds[index] = self._clock() - start
        self.part_seconds = tuple(seconds)
        merged = []
        for row, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            state.trees = [part[row] for part in parts]
            if self._draw is Draw.FREE:
                whole = merge(state.trees, self._names)
            else:
                whole = join(state.trees, self._names, vocab_size=self._vocab_size)
            fitting = first_levels(whole.tree.parents, budget.num_nodes)
            state.maps = [nodes.compose(fitting) for nodes in whole.maps]
            merged.append(fitting.cut(whole.tree))
        return merged

    def _draft_part(
        self,
        index: int,
        states: Sequence[MergedSequence],
        budgets: Sequence[Budget],
        earlier: Sequence[Sequence[TokenTree]],
    ) -> list[TokenTree]:
        held = [budget.of_part(index) for budget in budgets]
        conditions = [budget.conditions[index] if budget.conditions else None for budget in budgets]
        asked = [
            row
            for row, (budget, condition) in enumerate(zip(held, conditions, strict=True))
            if budget.num_nodes and budget.depth and (condition is None or condition.is_met(earlier[row]))
        ]
        trees = [EMPTY] * len(states)
        if asked:
            drafter = self._drafters[index]
            found = drafter.draft([states[row].parts[index] for row in asked], [held[row] for row in asked])
            for row, tree in zip(asked, found, strict=True):
                trees[row] = tree
        return trees

    def observe(self, observations: Sequence[Observation[MergedSequence]]) -> None:
        """Tell every part how far the text went along its own tree."""
        for index, drafter in enumerate(self._drafters):
            drafter.observe([self._of_part(index, observation) for observation in observations])
        for observation in observations:
            observation.state.trees, observation.state.maps = [], []

    def _of_part(self, index: int, whole: Observation[MergedSequence]) -> Observation[Any]:
        trees, verdict = whole.state.trees, self.own_verdict(index, whole.verdict)
        tree = trees[index] if trees else EMPTY
        if verdict is not None and trees:
            verdict = whole.state.maps[index].verdict_on_source(verdict)
        hidden = self.own_hidden(index, whole.hidden)
        return Observation(whole.state.parts[index], whole.tokens_read, tree, verdict, hidden)

    def close(self, state: MergedSequence) -> None:
        """Close every part."""
        for drafter, own in zip(self._drafters, state.parts, strict=True):
            if own is not None:
                drafter.close(own)

    def check_integrity(self, states: Sequence[MergedSequence]) -> None:
        """Check every part."""
        for index, drafter in enumerate(self._drafters):
            drafter.check_integrity([state.parts[index] for state in states if state.parts[index] is not None])


def _common_draws(draws: Sequence[frozenset[Draw]]) -> frozenset[Draw]:
    """How a merged tree's children may count, given what every part can give."""
    # whatever was drawn, shared or not, may count as chosen freely: a rule that takes that reads no distribution
    found = {Draw.FREE}
    if all(part & {Draw.IID, Draw.POINT} for part in draws):
        found.add(Draw.IID)
    return frozenset(found)


def part_draw(draws: frozenset[Draw], merged: Draw) -> Draw:
    """How one part draws its children, so that the merged tree's count as agreed."""
    wanted = (merged, Draw.POINT) if merged is Draw.IID else (merged, *Draw)
    return next(draw for draw in wanted if draw in draws)


@final
class RoutedDrafter(SeveralDrafters[Routed]):
    """Gives each sequence to one of several drafters.

    Args:
        index: the drafter of every name that a request can choose, or `PLAIN`.
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
