"""The first half of a round: budgets and drafts of its sequences, which a thread may make while another pass runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.core.node_map import NodeMap
from draftree.core.tree import EMPTY, TokenTree, is_chain
from draftree.core.types import Budget, Verdict
from draftree.engine.parts import Parts
from draftree.engine.sequence import WritingSequence
from draftree.models.base import Slot


@dataclass(slots=True)
class Turn:
    """One sequence in a round. Each phase fills in its part."""

    sequence: WritingSequence
    pending: list[int]
    """Written tokens that the target's slot does not hold yet; the last is the root."""
    drafted: TokenTree = EMPTY
    """As it was drafted."""
    tree: TokenTree = EMPTY
    """The part of it that is scored."""
    nodes: NodeMap | None = None
    """Where the nodes of `drafted` are in `tree`; None if the trees are one."""
    verdict: Verdict | None = None
    """None until there is one, and where the sequence failed."""
    picks: tuple[int, ...] = ()
    """The target's pick at every row of `tree`, if the request is traced."""

    @property
    def verdict_on_drafted(self) -> Verdict:
        """The verdict on the scored tree, with the nodes of the drafted tree."""
        assert self.verdict is not None, "failed sequences have no verdict"
        return self.verdict if self.nodes is None else self.nodes.verdict_on_source(self.verdict)


@dataclass(slots=True)
class DraftedTurns:
    """Drafts of the sequences of one round.

    Attributes:
        turns: one for each sequence.
        plan_seconds: time for budgets.
        draft_seconds: time for drafts that the round waited for.
        part_seconds: the share of each merged drafter in it; empty if nothing was drafted, or by one drafter.
    """

    turns: list[Turn]
    plan_seconds: float
    draft_seconds: float
    part_seconds: tuple[float, ...] = ()

    @property
    def states(self) -> list[Any]:
        """The planner's states of the sequences."""
        return [turn.sequence.plan_state for turn in self.turns]

    def wait_was(self, seconds: float) -> None:
        """Note that a round waited for so long: the rest of planning and drafting took place beside another pass."""
        share = min(1.0, seconds / self.draft_seconds) if self.draft_seconds > 0 else 0.0
        self.part_seconds = tuple(share * part for part in self.part_seconds)
        self.plan_seconds, self.draft_seconds = 0.0, seconds


def draft_turns(parts: Parts, sequences: Sequence[WritingSequence]) -> DraftedTurns:
    """Plan and draft for sequences of one round.

    Args:
        parts: planner and drafter of the round.
        sequences: those that write; each has a slot.

    Raises:
        Exception: what planner or drafter raised.
    """
    start = parts.clock()
    turns = [Turn(s, s.history.since(slot_of(s).length)) for s in sequences]
    states = [s.plan_state for s in sequences]
    budgets = [_in_room(budget, s) for budget, s in zip(parts.planner.budgets(states), sequences, strict=True)]
    planned = parts.clock()
    _draft(parts, turns, budgets)
    seconds = parts.clock() - planned
    has_drafted = any(len(turn.drafted) for turn in turns if turn.sequence.given is None)
    own = parts.drafter.part_seconds if parts.drafter is not None and has_drafted else ()
    return DraftedTurns(turns, planned - start, seconds, own)


def slot_of(sequence: WritingSequence) -> Slot:
    """Return the target's slot of a sequence in a round."""
    assert sequence.slot is not None, "a sequence in a round has a slot"
    return sequence.slot


def _in_room(budget: Budget, sequence: WritingSequence) -> Budget:
    # a round writes one token more than it drafts: the bonus needs room as well
    return budget.in_room(sequence.room - 1)


def _draft(parts: Parts, turns: Sequence[Turn], budgets: Sequence[Budget]) -> None:
    for turn in turns:
        if turn.sequence.given is not None:
            turn.drafted = turn.tree = turn.sequence.given.take()
    asked = [(t, b) for t, b in zip(turns, budgets, strict=True) if _may_draft(t.sequence, b)]
    if parts.drafter is None or not asked:
        return
    drafted = parts.drafter.draft([turn.sequence.draft_state for turn, _ in asked], [budget for _, budget in asked])
    for (turn, _), tree in zip(asked, drafted, strict=True):
        if not parts.target.supports_trees and not is_chain(tree.parents):
            raise AssertionError("a target that scores chains only was given a tree")
        turn.drafted = turn.tree = tree


def _may_draft(sequence: WritingSequence, budget: Budget) -> bool:
    """Whether there is a budget, or room for what a grammar forces, which needs none; not if a client drafts."""
    if sequence.given is not None:
        return False
    return bool(budget.num_nodes and budget.depth) or (sequence.controls.guide is not None and budget.room > 0)
