"""Summary of a trace: the run, its rounds, tokens per round and seconds by phase. No torch."""

from __future__ import annotations

from typing import Any

from draftree.analysis.trace import Trace, acceptance_length

__all__ = ["summary"]

DIGITS = 4


def summary(trace: Trace) -> dict[str, Any]:
    """Return facts about a trace as JSON values."""
    header, steps = trace.header, [step for one in trace.rounds for step in one.steps]
    names = trace.rounds[0].seconds if trace.rounds else {}
    drafted, accepted = sum(len(step.scored) for step in steps), sum(len(step.path) for step in steps)
    return {
        "model": header.model,
        "draft": header.draft,
        "verify": header.verify,
        "plan": header.plan,
        **({"about": dict(header.about)} if header.about else {}),
        "sequences": len({step.sequence for step in steps}),
        "rounds": len(trace.rounds),
        "tokens": sum(step.num_written for step in steps),
        "tokens_per_round": round(acceptance_length(trace.rounds), DIGITS),
        "scored_nodes": drafted,
        "accepted_nodes": accepted,
        "seconds": {name: round(sum(one.seconds[name] for one in trace.rounds), DIGITS) for name in names},
        "has_texts": bool(trace.texts),
    }
