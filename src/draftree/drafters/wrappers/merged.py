"""Several drafters as one: their trees are merged into one tree, scored in one pass.

Where the verifier reads no draft distributions, common prefixes are shared and every node names all its sources. Where
it does, each child keeps the distribution that it was drawn from, and children drawn from a model come before copied
ones (`core/joining.py`): a copied token that is tried first is often accepted where the model's draft would have gone
further.

Source: merge-based tree construction of SpecInfer, arXiv 2305.09781, section 3; the order of children is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, final

from draftree.core.clock import SYSTEM_CLOCK, Clock
from draftree.core.joining import join
from draftree.core.tree import EMPTY, Draw, TokenTree, first_levels, follow, merge, places
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
        self._trees: dict[int, list[TokenTree]] = {}

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
            self._trees[id(state)] = trees
            if self._draw is Draw.FREE:
                tree = merge(trees, self._names)
            else:
                tree = join(trees, self._names, vocab_size=self._vocab_size)
            merged.append(first_levels(tree, budget.num_nodes))
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
        own = [self._trees.pop(id(state), None) for state in states]
        tokens = [[t.tokens[node] for node in v.path] for t, v in zip(trees, verdicts, strict=True)]
        asked = [row for row, part in enumerate(own) if part is not None]
        for index, drafter in enumerate(self._drafters):
            parts = [own[row][index] for row in asked]  # type: ignore[index]
            heard = [
                Verdict(
                    tuple(follow(part, tokens[row])),
                    verdicts[row].bonus,
                    _own_picks(part, trees[row], verdicts[row].picks) if drafter.wants_picks else (),
                )
                for part, row in zip(parts, asked, strict=True)
            ]
            drafter.observe([states[row][index] for row in asked], parts, heard)

    @property
    def note(self) -> str:
        """What the parts decided."""
        return "; ".join(drafter.note for drafter in self._drafters if drafter.note)

    def close(self, state: list[Any]) -> None:
        """Close every part."""
        self._trees.pop(id(state), None)
        for drafter, own in zip(self._drafters, state, strict=True):
            drafter.close(own)

    def forget(self) -> None:
        """Let every part forget."""
        for drafter in self._drafters:
            drafter.forget()


def _own_picks(part: TokenTree, whole: TokenTree, picks: Sequence[int | None]) -> tuple[int | None, ...]:
    """The picks of a merged tree, as those of one of its parts."""
    if not picks:
        return ()
    return (picks[0], *(None if node is None else picks[1 + node] for node in places(part, whole)))


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
