"""A planner for each of several drafters: every sequence is planned by that of the drafter that its request chose.

Each planner sees the sequences of its own drafter, and is told how many others there are. It plans as if these drafted
nothing, so planners of one batch do not take their budgets from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from draftree.core.routing import PLAIN, Routed, rows_by_choice
from draftree.core.tree import TokenTree
from draftree.core.types import Budget, RoundRecord
from draftree.planners.base import Planner

NOTHING = Budget(0, 0)


@final
class RoutedPlanner(Planner[Routed]):
    """Gives each sequence to the planner of its drafter.

    Args:
        planners: one for each drafter, by the drafter's name.
        index: the drafter of every name that a request can choose, or `PLAIN`.
    """

    class Config:
        """A wrapper has no options of its own."""

    def __init__(self, planners: Mapping[str, Planner[Any]], index: Mapping[str, int]) -> None:
        self._planners, self._names = list(planners.values()), list(planners)
        self._index = dict(index)
        super().__init__(
            None,
            default_depth=max(own.default_depth for own in self._planners),
            default_nodes=max(own.default_nodes for own in self._planners),
            parts=[part for own in self._planners for part in own.parts],
        )

    @property
    def needs_confidence(self) -> bool:
        """Whether one of them asks its drafter to stop at low confidence."""
        return any(own.needs_confidence for own in self._planners)

    def open(self) -> Routed:
        """State for a new sequence of the default drafter."""
        return self.open_for("")

    def open_for(self, draft: str, *, is_sampled: bool = False) -> Routed:
        """State for a new sequence of the drafter with this name."""
        choice = self._index[draft]
        return Routed(choice, None if choice == PLAIN else self._planners[choice].open_for("", is_sampled=is_sampled))

    def budgets(self, states: Sequence[Routed]) -> list[Budget]:
        """The budgets of each planner for its sequences."""
        budgets = [NOTHING] * len(states)
        for choice, rows in rows_by_choice(states).items():
            others = len(states) - len(rows)
            self._planners[choice].note_others(others, others)
            found = self._planners[choice].budgets([states[row].own for row in rows])
            for row, budget in zip(rows, found, strict=True):
                budgets[row] = budget
        return budgets

    def trim(
        self, states: Sequence[Routed], trees: Sequence[TokenTree], *, draft_seconds: float
    ) -> list[Sequence[int] | None]:
        """Trim each tree by the planner of its sequence; `draft_seconds` is the time of all drafters."""
        kept: list[Sequence[int] | None] = [None] * len(trees)
        for choice, rows in rows_by_choice(states).items():
            own = [trees[row] for row in rows]
            if any(map(len, own)):
                planner = self._planners[choice]
                found = planner.trim([states[row].own for row in rows], own, draft_seconds=draft_seconds)
                for row, nodes in zip(rows, found, strict=True):
                    kept[row] = nodes
        return kept

    def observe(self, states: Sequence[Routed], record: RoundRecord) -> None:
        """Tell each planner what came of its budgets."""
        for choice, rows in rows_by_choice(states).items():
            own = self._own_record(choice, rows, record)
            others = len(states) - len(rows)
            if others:
                all_drafted, drafted = (sum(row.num_drafted for row in one.sequences) for one in (record, own))
                self._planners[choice].note_others(others, others + all_drafted - drafted)
            self._planners[choice].observe([states[row].own for row in rows], own)

    def _own_record(self, choice: int, rows: Sequence[int], record: RoundRecord) -> RoundRecord:
        """The record with the planner's own sequences, and its drafter's seconds."""
        if len(self._planners) == 1 and len(rows) == len(record.sequences):
            return record
        own = replace(record, sequences=tuple([record.sequences[row] for row in rows]))
        if len(self._planners) == 1:
            return own
        if record.part_seconds:
            start = sum(len(planner.parts) for planner in self._planners[:choice])
            parts = record.part_seconds[start : start + len(self._planners[choice].parts)]
            seconds = sum(parts)
        else:
            parts, seconds = (), len(rows) / len(record.sequences) * record.draft_seconds
        return replace(
            own,
            draft_seconds=seconds,
            total_seconds=record.total_seconds - record.draft_seconds + seconds,
            part_seconds=parts if len(parts) > 1 else (),
        )

    def explain(self) -> str:
        """The reasons of all planners, each with its drafter's name."""
        if len(self._planners) == 1:
            return self._planners[0].explain()
        reasons = [(name, own.explain()) for name, own in zip(self._names, self._planners, strict=True)]
        return "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)

    def explain_of(self, state: Routed) -> str:
        """The reason of the planner of this sequence."""
        return "" if state.choice == PLAIN else self._planners[state.choice].explain()
