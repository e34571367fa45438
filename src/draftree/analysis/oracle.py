"""How far a planner that knows the text could come: the best tree of n nodes at every position. No torch in here.

Of what was drafted it scores the nodes that will be accepted and no others, n at most. No planner over the same drafts
accepts more with n nodes; how much of it a planner reaches is what it can still gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.analysis.simulator import scripts_of
from draftree.analysis.trace import Trace
from draftree.analysis.trace_costs import CostModel
from draftree.core.tree import EMPTY, follow


@dataclass(frozen=True, slots=True)
class Bound:
    """The best there is with so many nodes a round.

    Attributes:
        num_nodes: a sequence at most.
        acceptance_length: tokens written a round.
        tokens_per_second: by the cost model, drafts free, one sequence at a time.
    """

    num_nodes: int
    acceptance_length: float
    tokens_per_second: float


def bounds(trace: Trace, costs: CostModel, sizes: Sequence[int]) -> list[Bound]:
    """A bound for every size; 0 is plain decoding."""
    return [_bound(trace, costs, size) for size in sizes]


def _bound(trace: Trace, costs: CostModel, size: int) -> Bound:
    rounds = tokens = 0
    seconds = 0.0
    for script in scripts_of(trace):
        while not script.is_done:
            coming = script.coming()
            right = len(follow(script.drafted() or EMPTY, coming[:-1]))
            accepted = min(size, right, len(coming) - 1)
            rounds, tokens = rounds + 1, tokens + accepted + 1
            seconds += costs.pass_seconds(1 + accepted, batch=1, prefix=script.place)
            script.place += accepted + 1
    return Bound(size, tokens / rounds if rounds else 0.0, tokens / seconds if seconds else 0.0)
