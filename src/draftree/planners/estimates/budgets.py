"""Budgets of a round by the plans of the drafters, and what was drafted within them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.core.conditions import DraftCondition
from draftree.core.types import Budget, SequenceRecord
from draftree.planners.estimates.acceptance import SequenceAcceptance
from draftree.planners.estimates.credit import Credits
from draftree.planners.estimates.drafting import PartPlan
from draftree.planners.estimates.levels import SequenceLevels


@dataclass(slots=True)
class SequenceEstimates:
    """Estimates for one sequence. Mutated every round.

    Attributes:
        acceptance: deviation of its nodes' acceptance from that of all sequences.
        parts: its gains from each drafter.
        length: tokens of the text as of the last round; 0 before the first one.
        drafted: levels that each drafter drafted in the last round.
    """

    acceptance: SequenceAcceptance
    parts: tuple[SequenceLevels, ...]
    length: int = 0
    drafted: tuple[int, ...] = ()


def budget_of(
    plans: Sequence[PartPlan], asked: Sequence[int], conditions: Sequence[DraftCondition | None], *, limit: int
) -> Budget:
    """Return the budget of a sequence.

    Args:
        plans: of the drafters.
        asked: levels of each drafter.
        conditions: on which each drafts.
        limit: maximum number of nodes, and of levels.
    """
    asked = tuple(min(levels, limit) for levels in asked)
    depth = max(asked)
    survivals = [plan.min_survival for plan, levels in zip(plans, asked, strict=True) if levels]
    return Budget(
        limit if depth else 0,
        depth,
        part_depths=asked if len(asked) > 1 else (),
        min_survival=min((survival for survival in survivals if survival), default=0.0),
        conditions=tuple(conditions) if any(conditions) else (),
    )


def conditions_of(
    index: int,
    plans: Sequence[PartPlan],
    asked: Sequence[Sequence[int]],
    gains: Sequence[Sequence[float]],
    least: float,
    states: Sequence[SequenceEstimates],
) -> list[DraftCondition | None]:
    """Return what a drafter's draft must add to the drafts of lookups, which come first, for every sequence.

    Args:
        index: of the drafter.
        plans: of all drafters.
        asked: levels by drafter and sequence.
        gains: expected gains of the drafter by sequence and level.
        least: tokens that its draft costs.
        states: of the sequences.
    """
    found: list[DraftCondition | None] = [None] * len(states)
    if not plans[index].part.runs_model:
        return found
    for place, (own, state) in enumerate(zip(gains, states, strict=True)):
        lookups = [
            part
            for part, plan in enumerate(plans)
            if asked[part][place] and not plan.part.runs_model and plan.part.gives_confidence
        ]
        if lookups:
            trust = min(plans[part].levels_of(state.parts[part]).hit_ratio for part in lookups)
            found[place] = DraftCondition(tuple(own), least, min(1.0, trust))
    return found


def note_drafted(
    plans: Sequence[PartPlan],
    credits: Credits,
    asked: Sequence[list[int]],
    conditions: Sequence[Sequence[DraftCondition | None]],
    states: Sequence[SequenceEstimates],
    rows: Sequence[SequenceRecord],
    firsts: Sequence[bool],
) -> None:
    """Note what was drafted, and set the levels of drafters to 0 that were skipped or not ready.

    A drafter that runs a model is skipped if its condition is not met. In the first round of a text it may not have
    read the text yet.

    Args:
        plans: of the drafters.
        credits: attribution of nodes to drafters.
        asked: levels by drafter and sequence.
        conditions: by drafter and sequence.
        states: of the sequences.
        rows: records of the round.
        firsts: whether the round is the first one of each text.
    """
    for place, (state, row, is_first) in enumerate(zip(states, rows, firsts, strict=True)):
        state.drafted = tuple([credits.depth_of(part, row.drafted) for part in range(len(plans))])
        for part, plan in enumerate(plans):
            may_be_empty = is_first or conditions[part][place] is not None
            if may_be_empty and plan.part.runs_model and not state.drafted[part]:
                asked[part][place] = 0
