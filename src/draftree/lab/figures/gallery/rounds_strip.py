"""Rounds of one text as a strip: what each round drafted and accepted, with a fixed and with a planned length."""

from __future__ import annotations

from typing import Any, final

from draftree.engine.trace import Step, Trace
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK
from draftree.lab.figures.measures import measured_on

RUNS_SHOWN = ("fixed", "adaptive")


@final
class RoundsStrip(Figure):
    title = "Rounds over one text: fixed and planned length"
    runs = RUNS_SHOWN
    size = (8.0, 4.0)

    def data(self, material: Material) -> Data:
        traces = {run: material.one(run) for run in RUNS_SHOWN}
        rows: list[dict[str, Any]] = []
        for run, trace in traces.items():
            at = 0
            for number, step in enumerate(_steps(trace)):
                scored = len(step.scored)
                accepted = min(len(step.path), step.num_written)
                plan = trace.header.plan
                rows.append(
                    {"run": run, "plan": plan, "round": number, "position": at, "scored": scored, "accepted": accepted,
                     "written": step.num_written}
                )  # fmt: skip
                at += step.num_written
        wasted = [row for row in rows if row["scored"] and not row["accepted"]]
        counts = {run: sum(row["run"] == run for row in rows) for run in traces}
        return Data(
            rows,
            measured_on(traces["fixed"], what="First text of the run")
            + f"; {counts['fixed']} rounds with plan {traces['fixed'].header.plan}, {counts['adaptive']} with "
            f"{traces['adaptive'].header.plan}",
            f"{len(wasted)} of {sum(counts.values())} rounds draft without any accepted token",
        )

    def draw(self, figure: Any, data: Data) -> None:
        for axes, run in zip(figure.subplots(2, 1, sharex=True, sharey=True), RUNS_SHOWN, strict=True):
            rows = [row for row in data.rows if row["run"] == run]
            x, width = [row["position"] for row in rows], [row["written"] for row in rows]
            drafted = [row["scored"] for row in rows]
            kept = [row["accepted"] for row in rows]
            given = {"align": "edge", "edgecolor": "white", "linewidth": 0.6}
            axes.bar(x, drafted, width, color="#ffd8d3", hatch="//", label="drafted, rejected", **given)
            axes.bar(x, kept, width, color=INK["good"], label="accepted", **given)
            axes.set(ylabel="drafted nodes", title=f"plan {rows[0]['plan']}: {len(rows)} rounds")
        axes.set_xlabel("position in the text; the width of a bar is the number of tokens that the round wrote")
        axes.legend(fontsize=7.5, ncols=2)


def _steps(trace: Trace) -> list[Step]:
    """Return the rounds of the first sequence."""
    first = trace.rounds[0].steps[0].sequence
    return [step for one in trace.rounds for step in one.steps if step.sequence == first]
