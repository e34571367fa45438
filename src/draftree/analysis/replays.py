"""Table of one trace under several planners, with bounds and rank hits. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.analysis.oracle import bounds
from draftree.analysis.ranks import rank_hits
from draftree.analysis.simulator import Simulated, Simulation
from draftree.analysis.trace import Trace
from draftree.analysis.trace_costs import TraceCosts
from draftree.core.errors import ConfigurationError
from draftree.planners import PLANNERS
from draftree.planners.base import Planner, require_effect

PLAIN = "fixed:0"
RULES = ("coupled", "match")
HEAD = f"{'plan':<20}{'tokens/round':>16}{'scored':>10}{'accepted':>10}{'tokens/s':>10}{'x plain':>9}{'missing':>9}"


def planner_of(trace: Trace, plan: str) -> Planner:
    """Return a fresh planner for the drafters of a trace.

    Raises:
        ConfigurationError: unknown planner, or an option that has no effect for these drafters.
    """
    specs = PLANNERS.parse(plan)
    if len(specs) != 1:
        raise ConfigurationError(f"planner '{plan}' names {len(specs)} methods: name one")
    cls, config = PLANNERS.configure(specs[0])
    parts = trace.header.parts
    depth, nodes = max(part.depth for part in parts), sum(part.nodes for part in parts)
    planner = cls(config, default_depth=depth, default_nodes=nodes, parts=parts)
    require_effect(planner, plan=plan, draft=trace.header.draft)
    return planner


def replays(trace: Trace, *, plans: Sequence[str], sizes: Sequence[int]) -> str:
    """Return the table as text.

    Raises:
        ConfigurationError: the trace's verifier does not preserve the text, or a planner is unknown.
    """
    header = trace.header
    if header.verify.split(",")[0] not in RULES:
        raise ConfigurationError(
            f"the trace was verified by '{header.verify}', whose text depends on the draft: "
            f"other plans can be simulated for {' and '.join(RULES)} only"
        )
    costs = TraceCosts(trace)
    found = {plan: Simulation(trace, planner_of(trace, plan), costs).run() for plan in dict.fromkeys((PLAIN, *plans))}
    plain = found[PLAIN].tokens_per_second
    lines = [f"{header.model}, {header.draft}, recorded under {header.plan}; seconds from the trace", "", HEAD]
    lines += [_line("plain" if plan == PLAIN else plan, one, plain) for plan, one in found.items()]
    lines += ["", "bounds: only nodes that will be accepted, free drafts, one sequence at a time"]
    lines += [
        f"{f'{bound.num_nodes} nodes':<20}{bound.acceptance_length:>16.2f}{bound.tokens_per_second:>30.1f}"
        for bound in bounds(trace, costs, sizes)
    ]
    return "\n".join([*lines, "", *_rank_lines(trace)])


def _rank_lines(trace: Trace) -> list[str]:
    """Return lines on the frequency of the target's next token among the first guesses."""
    found = rank_hits(trace)
    counts = f"{found.num_positions} positions ({found.num_drafted} drafted)"
    head = f"the target's next token among the first guesses, of {counts}"
    return [head, *(f"{f'first {rank}':<20}{share:>16.3f}" for rank, share in enumerate(found.cumulated, 1))]


def _line(name: str, one: Simulated, plain: float) -> str:
    ratio = one.tokens_per_second / plain if plain else 0.0
    return (
        f"{name:<20}{one.acceptance_length:>16.2f}{one.drafted:>10}{one.accepted:>10}"
        f"{one.tokens_per_second:>10.1f}{ratio:>9.2f}{one.missing:>9}"
    )
