"""Speed-up against the length of the chain, timed, beside (1 - α^(K + 1)) / ((1 - α) (K c + 1)).

Source: arXiv 2211.17192, theorem 3.8. The closed form assumes equal and independent acceptance, and that a pass over
K + 1 tokens takes as long as one over one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.core.tree import depths
from draftree.engine.trace import Trace
from draftree.lab.analysis.theory import walltime_improvement
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, band, legend
from draftree.lab.figures.measures import decode_rounds, estimates, measured_on, per_text_seconds, ratio


@final
class Walltime(Figure):
    title = "Wall-time improvement against the length of the chain"
    runs = ("plain", "length")

    def data(self, material: Material) -> Data:
        plain = material.one("plain")
        traces = sorted(material.all("length"), key=length_of)
        alpha = first_acceptance(traces)
        cost = pass_cost(traces, plain)
        seconds, tokens = per_text_seconds(plain)
        rows = [{"length": 0, "measured": 1.0, "measured_low": 1.0, "measured_high": 1.0, "closed_form": 1.0}]
        for trace in traces:
            spent, written = per_text_seconds(trace)
            found = ratio(
                [s / t for s, t in zip(seconds, tokens, strict=True)],
                [s / t for s, t in zip(spent, written, strict=True)],
            )
            length = length_of(trace)
            closed = walltime_improvement(alpha, length, cost)
            rows.append({"length": length, **found.row("measured"), "closed_form": closed})
        worst = min(rows[1:], key=lambda row: row["measured"])
        verdict = "slower than plain decoding" if worst["measured"] < 1 else "the smallest gain"
        return Data(
            rows,
            measured_on(
                traces[0], what="Plain seconds per token / speculative seconds per token, first rounds excluded"
            )
            + f"; closed form at α = {alpha:.3f}, c = {cost:.3f}; bars: 95% over texts",
            f"length {worst['length']}: {worst['measured']:.2f}, {verdict}",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        x = [row["length"] for row in data.rows]
        closed = [row["closed_form"] for row in data.rows]
        axes.plot(x, closed, color=INK["theory"], linestyle="--", label="closed form")
        band(axes, x, estimates(data.rows, "measured"), label="measured", colour=INK["measured"])
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(x)
        axes.set(xlabel="length K of the chain", ylabel="speed-up over plain decoding", ylim=(0, None))
        legend(axes)


def length_of(trace: Trace) -> int:
    """Return the planned length of a trace of the planner `fixed`."""
    name, _, length = trace.header.plan.partition(":")
    if name != "fixed" or not length.isdigit():
        raise ConfigurationError(f"a trace of plan '{trace.header.plan}' has no fixed length: record with fixed:K")
    return int(length)


def first_acceptance(traces: Sequence[Trace]) -> float:
    """Return the share of rounds with a draft whose first token was accepted."""
    steps = [step for trace in traces for one in trace.rounds for step in one.steps if len(step.scored)]
    return sum(bool(step.path) for step in steps) / len(steps) if steps else 0.0


def pass_cost(traces: Sequence[Trace], plain: Trace) -> float:
    """Return the seconds of one drafted level divided by those of a plain round."""
    levels = seconds = 0.0
    for trace in traces:
        for one in trace.rounds:
            levels += max((max(depths(step.tree.parents), default=0) for step in one.steps), default=0)
            seconds += one.seconds["draft"]
    rounds = decode_rounds(plain)
    return (seconds / levels) / (sum(s["total"] for _, s, _ in rounds) / len(rounds)) if levels else 0.0
