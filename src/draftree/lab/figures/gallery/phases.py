"""Milliseconds per written token by phase of the round: draft, score, verify, and the rest."""

from __future__ import annotations

from typing import Any, final

from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK
from draftree.lab.figures.measures import decode_rounds, measured_on, ratio, spread

PHASES = {"draft": INK["other"], "score": INK["measured"], "verify": INK["good"], "other": INK["theory"]}
RUNS_SHOWN = ("plain", "fixed", "adaptive")


@final
class Phases(Figure):
    title = "Where the time goes: milliseconds per token by phase"
    runs = RUNS_SHOWN

    def data(self, material: Material) -> Data:
        traces = {run: material.one(run) for run in RUNS_SHOWN}
        rows: list[dict[str, Any]] = []
        for run, trace in traces.items():
            rounds = decode_rounds(trace)
            names = list(dict.fromkeys(name for name, _, _ in rounds))
            tokens = [sum(n for other, _, n in rounds if other == name) for name in names]
            totals = [1e3 * sum(s["total"] for other, s, _ in rounds if other == name) for name in names]
            spent = {p: 1e3 * sum(s[p] for _, s, _ in rounds) / sum(tokens) for p in ("draft", "score", "verify")}
            total = ratio(totals, tokens)
            rest = total.value - sum(spent.values())
            rows.append({"run": run, "plan": trace.header.plan, **spent, "other": rest, **total.row("total")})
        plain = rows[0]["total"]
        best = min(row["total"] for row in rows[1:])
        slowest = max(rows[1:], key=lambda row: row["total"])
        return Data(
            rows,
            measured_on(traces["fixed"], what="Decode time") + "; black: 95% over texts",
            f"plan {slowest['plan']} takes {slowest['total'] / plain:.2f} times the time of plain decoding; the other "
            f"plan {best / plain:.2f} times",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        names = ["plain decoding" if row["run"] == "plain" else f"plan {row['plan']}" for row in data.rows]
        left = [0.0] * len(names)
        for phase, colour in PHASES.items():
            values = [max(0.0, row[phase]) for row in data.rows]
            axes.barh(names, values, left=left, color=colour, label=phase, edgecolor="white", linewidth=0.8)
            left = [start + value for start, value in zip(left, values, strict=True)]
        axes.errorbar(
            [row["total"] for row in data.rows],
            names,
            xerr=spread(data.rows, "total"),
            fmt="none",
            color="black",
            capsize=3,
        )
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds per written token")
        axes.legend(fontsize=7.5, ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0))
