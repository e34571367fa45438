"""Several drafters as one: their trees are merged into one tree, scored in one pass.

Where the verifier reads no draft distributions, common prefixes are shared and every node names all its sources. Where
it does, each child keeps the distribution that it was drawn from, and children drawn from a model come before copied
ones (`core/joining.py`): a copied token that is tried first is often accepted where the model's draft would have gone
further.

Source: merge-based tree construction of SpecInfer, arXiv 2305.09781, section 3; the order of children is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, final

from draftree.core.clock import SYSTEM_CLOCK, Clock
from draftree.core.joining import join, merge
from draftree.core.node_map import NodeMap, first_levels
from draftree.core.tree import EMPTY, Draw, TokenTree
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import Drafter, SequenceView
from draftree.models.memory import Footprint, total


@final
class MergedDrafter(Drafter[list[Any]]):
    """Asks every drafter for a tree, each within the whole budget or its part of it, and merges what they give.

    Args:
        drafters: in the order of the spec.
        names: the specs, as statistics name them.
        draw: how the merged tree's children count.
        vocab_size: width of the distributions.
        clock: what `part_seconds` are read from.
    """

    class Config:
        """A merged drafter has no options of its own."""

    def __init__(
        self,
        drafters: Sequence[Drafter[Any]],
        names: Sequence[str],
        *,
        draw: Draw,
        vocab_size: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._drafters = list(drafters)
        self._names = list(names)
        self._draw = draw
        self._vocab_size = vocab_size
        self._clock = clock
        self.reads_predictions = any(drafter.reads_predictions for drafter in drafters)
        self.wants_picks = any(drafter.wants_picks for drafter in drafters)
        self._drafted: dict[int, list[tuple[TokenTree, NodeMap]]] = {}
        """The parts' trees by id of the state, each with where its nodes are in the tree that was returned."""

    @classmethod
    def draws(cls, config: Any) -> frozenset[Draw]:
        """Decided by `common_draws`, since it depends on the parts."""
        return frozenset({Draw.FREE, Draw.IID})

    @classmethod
    def default_depth(cls, config: Any) -> int:
        """Decided by the parts."""
        return 0

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room in all parts."""
        for drafter in self._drafters:
            drafter.reserve(num_sequences, length)

    @property
    def footprint(self) -> Footprint:
        """Of all parts together."""
        return total(drafter.footprint for drafter in self._drafters)

    def open(self, sequence: SequenceView) -> list[Any]:
        """A state of every part."""
        return [drafter.open(sequence) for drafter in self._drafters]

    def draft(self, states: Sequence[list[Any]], budgets: Sequence[Budget]) -> list[TokenTree]:
        """The merged trees, held to the budgets."""
        parts, times = [], [self._clock()]
        for index in range(len(self._drafters)):
            parts.append(self._draft_part(index, states, budgets))
            times.append(self._clock())
        self.part_seconds = tuple(after - before for before, after in pairwise(times))
        merged = []
        for row, (state, budget) in enumerate(zip(states, budgets, strict=True)):
            trees = [part[row] for part in parts]
            if self._draw is Draw.FREE:
                whole = merge(trees, self._names)
            else:
                whole = join(trees, self._names, vocab_size=self._vocab_size)
            fitting = first_levels(whole.tree.parents, budget.num_nodes)
            self._drafted[id(state)] = [
                (tree, nodes.compose(fitting)) for tree, nodes in zip(trees, whole.maps, strict=True)
            ]
            merged.append(fitting.cut(whole.tree))
        return merged

    def _draft_part(self, index: int, states: Sequence[list[Any]], budgets: Sequence[Budget]) -> list[TokenTree]:
        held = [budget.of_part(index) for budget in budgets]
        asked = [row for row, budget in enumerate(held) if budget.num_nodes and budget.depth]
        trees = [EMPTY] * len(states)
        if asked:
            found = self._drafters[index].draft([states[row][index] for row in asked], [held[row] for row in asked])
            for row, tree in zip(asked, found, strict=True):
                trees[row] = tree
        return trees

    def observe(self, states: Sequence[list[Any]], trees: Sequence[TokenTree], verdicts: Sequence[Verdict]) -> None:
        """Tell every part how far the text went along its own tree."""
        drafted = [self._drafted.pop(id(state), None) for state in states]
        rows = [(state, own, v) for state, own, v in zip(states, drafted, verdicts, strict=True) if own is not None]
        for index, drafter in enumerate(self._drafters):
            drafter.observe(
                [state[index] for state, _, _ in rows],
                [own[index][0] for _, own, _ in rows],
                [
                    own[index][1].verdict_on_source(verdict if drafter.wants_picks else replace(verdict, picks=()))
                    for _, own, verdict in rows
                ],
            )

    @property
    def note(self) -> str:
        """What the parts decided."""
        return "; ".join(drafter.note for drafter in self._drafters if drafter.note)

    def close(self, state: list[Any]) -> None:
        """Close every part."""
        self._drafted.pop(id(state), None)
        for drafter, own in zip(self._drafters, state, strict=True):
            drafter.close(own)

    def forget(self) -> None:
        """Let every part forget."""
        for drafter in self._drafters:
            drafter.forget()


def common_draws(draws: Sequence[frozenset[Draw]]) -> frozenset[Draw]:
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
