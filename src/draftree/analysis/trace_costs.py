"""Cost model of unrecorded rounds, fitted to the recorded ones. No torch."""

from __future__ import annotations

from typing import Protocol, final

from draftree.analysis.trace import Trace, TracedRound
from draftree.core.tree import depths
from draftree.planners.estimates.costs import DraftCosts, PassCosts


class CostModel(Protocol):
    """Seconds of rounds that were not recorded."""

    def pass_seconds(self, rows: int, *, batch: int, prefix: int) -> float:
        """Return the seconds of a round without its draft."""
        ...

    def draft_seconds(self, part: int, depth: int) -> float:
        """Return the seconds of a draft of `depth` levels by one of the drafters."""
        ...


@final
class TraceCosts:
    """Costs from a trace: the measured curve of passes, scaled to the recorded rounds.

    Args:
        trace: the recorded run; rounds with prefill are ignored.
    """

    def __init__(self, trace: Trace) -> None:
        self._passes = PassCosts()
        self._passes.learn(trace.header.pass_seconds)
        self._drafts = [DraftCosts() for _ in trace.header.parts]
        met: set[str] = set()
        for one in trace.rounds:
            names = {step.sequence for step in one.steps}
            if names <= met:
                self._learn(one)
            met |= names

    def _learn(self, one: TracedRound) -> None:
        drafted = sum(len(s.tree) if s.kept is None else len(s.kept) for s in one.steps)
        batch = len(one.steps)
        if one.num_rows == batch + drafted:
            prefix = sum(step.prefix for step in one.steps) // batch
            draft = one.seconds["draft"]
            seconds = one.seconds["total"] - draft
            self._passes.observe(one.num_rows, batch, prefix, seconds=seconds, is_plain=not draft)
        deepest = max(max(depths(step.tree.parents), default=0) for step in one.steps)
        for costs, seconds in zip(self._drafts, one.part_seconds or (one.seconds["draft"],), strict=False):
            if deepest:
                costs.observe(seconds, deepest, unread=0)

    def pass_seconds(self, rows: int, *, batch: int, prefix: int) -> float:
        """Return the seconds by the cell of this batch and prefix."""
        return self._passes.curve(batch, prefix, max_rows=rows)[rows]

    def draft_seconds(self, part: int, depth: int) -> float:
        """Return the seconds of `depth` levels at the mean cost of a level."""
        return self._drafts[part].of(depth)
