"""Several drafters as one: their trees are merged into one tree, which is scored in one pass.

Where the verifier reads no draft distributions, common prefixes are shared and every node names all its sources. Where
it does, each child keeps the distribution that it was drawn from, and children drawn from a model come before copied
ones (`core/node_map.py`): a copied token that is tried first is often accepted where the model's draft would have gone
further.

Source: merge-based tree construction of SpecInfer, arXiv 2305.09781, section 3; the order of children is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final
from weakref import WeakSet

from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.core.node_map import NodeMap, first_levels, join, merge
from draftree.core.tensors import layers_of
from draftree.core.tree import EMPTY, Draw, TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import NO_DRAFTS, Drafter, DraftTraits, Observation, SequenceView
from draftree.models.memory import Footprint, total


@dataclass(slots=True, eq=False, weakref_slot=True)
class MergedSequence:
    """A sequence of merged drafters. Mutated by `MergedDrafter` only."""

    parts: list[Any]
    """A state for every part; None where a part keeps nothing of a finished sequence."""
    trees: list[TokenTree] = field(default_factory=list)
    """The last tree of every part; empty if nothing was drafted."""
    maps: list[NodeMap] = field(default_factory=list)
    """Where the nodes of these trees are in the merged tree."""


@final
class _Released(Drafter[None]):
    """In the place of a drafter that was released."""

    def __init__(self) -> None:
        pass

    def open(self, sequence: SequenceView) -> None:
        return None


@final
class MergedDrafter(Drafter[MergedSequence]):
    """Merges the trees of several drafters, each drafted within the whole budget or its part of it."""

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
        self._drafters = list(drafters)
        self._names = list(names)
        self._traits = list(traits)
        self._features = self.describe(traits).features
        self._clock = clock
        self._draw = draw
        self._vocab_size = vocab_size
        self._open: WeakSet[MergedSequence] = WeakSet()

    @classmethod
    def describe(cls, config: Sequence[DraftTraits]) -> DraftTraits:
        # whatever was drawn, shared or not, may count as chosen freely: a rule that takes that reads no distribution
        draws = {Draw.FREE, Draw.IID} if all(part.draws & {Draw.IID, Draw.POINT} for part in config) else {Draw.FREE}
        return DraftTraits(
            draws=frozenset(draws),
            depth=max(part.depth for part in config),
            nodes=sum(part.nodes for part in config),
            branches=len(config) > 1 or config[0].branches,
            gives_confidence=all(part.gives_confidence for part in config),
            works_ahead=any(part.works_ahead for part in config),
            runs_model=any(part.runs_model for part in config),
            reads_sources=all(part.reads_sources for part in config if part.runs_model),
            reads_predictions=any(part.reads_predictions for part in config),
            reads_grammars=any(part.reads_grammars for part in config),
            wants_picks=any(part.wants_picks for part in config),
            features=tuple(dict.fromkeys(layer for part in config for layer in part.features)),
            learns=any(part.learns for part in config),
        )

    def reserve(self, num_sequences: int, length: int) -> None:
        for drafter in self._drafters:
            drafter.reserve(num_sequences, length)

    @property
    def footprint(self) -> Footprint:
        return total(drafter.footprint for drafter in self._drafters)

    @property
    def note(self) -> str:
        return "; ".join(drafter.note for drafter in self._drafters if drafter.note)

    def forget(self) -> None:
        for drafter in self._drafters:
            drafter.forget()

    def open(self, sequence: SequenceView) -> MergedSequence:
        return self._opened([drafter.open(sequence) for drafter in self._drafters])

    def _opened(self, parts: list[Any]) -> MergedSequence:
        state = MergedSequence(parts)
        self._open.add(state)
        return state

    def release(self, part: int) -> DraftTraits:
        for state in self._open:
            if state.parts[part] is not None:
                self._drafters[part].close(state.parts[part])
                state.parts[part] = None
        self._drafters[part] = _Released()
        self._traits[part] = NO_DRAFTS
        traits = self.describe(self._traits)
        self._features = traits.features
        return traits

    def fork(self, state: MergedSequence, sequence: SequenceView, length: int) -> MergedSequence:
        pairs = zip(self._drafters, state.parts, strict=True)
        return self._opened([d.open(sequence) if part is None else d.fork(part, sequence, length) for d, part in pairs])

    def detach(self, state: MergedSequence, length: int) -> MergedSequence | None:
        self._open.discard(state)
        kept = [drafter.detach(part, length) for drafter, part in zip(self._drafters, state.parts, strict=True)]
        return None if all(part is None for part in kept) else self._opened(kept)

    def attach(self, state: MergedSequence, sequence: SequenceView, length: int) -> MergedSequence:
        self._open.discard(state)
        pairs = zip(self._drafters, state.parts, strict=True)
        return self._opened(
            [d.open(sequence) if part is None else d.attach(part, sequence, length) for d, part in pairs]
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
        rows = []
        held = []
        for row, budget in enumerate(budgets):
            part = budget.of_part(index)
            condition = budget.conditions[index] if budget.conditions else None
            if part.num_nodes and part.depth and (condition is None or condition.is_met(earlier[row])):
                rows.append(row)
                held.append(part)
        trees = [EMPTY] * len(states)
        if rows:
            drafted = self._drafters[index].draft([states[row].parts[index] for row in rows], held)
            for row, tree in zip(rows, drafted, strict=True):
                trees[row] = tree
        return trees

    def observe(self, observations: Sequence[Observation[MergedSequence]]) -> None:
        for index, drafter in enumerate(self._drafters):
            drafter.observe([self._of_part(index, observation) for observation in observations])
        for observation in observations:
            observation.state.trees = []
            observation.state.maps = []

    def _of_part(self, index: int, whole: Observation[MergedSequence]) -> Observation[Any]:
        trees = whole.state.trees
        verdict = whole.verdict
        hidden = whole.hidden
        traits = self._traits[index]
        if verdict is not None and verdict.picks and not traits.wants_picks:
            verdict = replace(verdict, picks=())
        if verdict is not None and trees:
            verdict = whole.state.maps[index].verdict_on_source(verdict)
        if hidden is not None:
            columns = [self._features.index(layer) for layer in traits.features]
            hidden = layers_of(hidden, columns) if columns else None
        tree = trees[index] if trees else EMPTY
        return Observation(whole.state.parts[index], whole.tokens_read, tree, verdict, hidden)

    def close(self, state: MergedSequence) -> None:
        self._open.discard(state)
        for drafter, part in zip(self._drafters, state.parts, strict=True):
            if part is not None:
                drafter.close(part)

    def check_integrity(self, states: Sequence[MergedSequence]) -> None:
        for index, drafter in enumerate(self._drafters):
            drafter.check_integrity([state.parts[index] for state in states if state.parts[index] is not None])


def part_draw(draws: frozenset[Draw], merged: Draw) -> Draw:
    """How one part draws its children, so that the merged tree's count as agreed."""
    wanted = (merged, Draw.POINT) if merged is Draw.IID else (merged, *Draw)
    return next(draw for draw in wanted if draw in draws)
