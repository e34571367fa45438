"""What rounds that were not recorded would have taken, from those that were. No torch in here."""

from __future__ import annotations

from typing import Protocol, final

from draftree.analysis.trace import Trace, TracedRound
from draftree.core.tree import depths
from draftree.planners.estimates.costs import DraftCosts, PassCosts


class CostModel(Protocol):
    """Seconds of what did not happen."""

    def pass_seconds(self, rows: int, *, batch: int, prefix: int) -> float:
        """A round without its draft."""
        ...

    def draft_seconds(self, part: int, depth: int) -> float:
        """A draft of so many levels by one of the drafters."""
        ...


@final
class TraceCosts:
    """Costs as a trace shows them: the measured curve of passes, moved to where the recorded rounds lie.

    Args:
        trace: the rounds; those that read a prompt are left out.
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
            self._passes.observe(one.num_rows, batch, prefix, seconds=one.seconds["total"] - one.seconds["draft"])
        deepest = max(max(depths(step.tree.parents), default=0) for step in one.steps)
        for costs, seconds in zip(self._drafts, one.part_seconds or (one.seconds["draft"],), strict=False):
            if deepest:
                costs.observe(seconds, deepest, unread=0)

    def pass_seconds(self, rows: int, *, batch: int, prefix: int) -> float:
        """From the cell of this batch and prefix."""
        return self._passes.curve(batch, prefix, max_rows=rows)[rows]

    def draft_seconds(self, part: int, depth: int) -> float:
        """As many levels as the mean level costs."""
        return self._drafts[part].of(depth)
