"""Upper bounds on planners: the best tree of n nodes at every position, with knowledge of the text. No torch.

From each draft the bound scores only the nodes that will be accepted, n at most. No planner over the same drafts
accepts more with n nodes, so the difference to a planner is its possible gain.
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
    """The upper bound for a number of nodes per round.

    Attributes:
        num_nodes: maximum nodes per sequence.
        acceptance_length: tokens written per round.
        tokens_per_second: by the cost model, with free drafts, one sequence at a time.
    """

    num_nodes: int
    acceptance_length: float
    tokens_per_second: float


def bounds(trace: Trace, costs: CostModel, sizes: Sequence[int]) -> list[Bound]:
    """Return a bound for every size; 0 is plain decoding."""
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
