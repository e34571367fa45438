"""Tokens per pass of every rule against the temperature, with the same drafter and length."""

from __future__ import annotations

from typing import Any, final

from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import legend
from draftree.lab.figures.measures import estimates, measured_on, tokens_per_round

STYLES = {
    "coupled": ("#0068b5", "o", "-"),
    "match": ("#2a97b5", "s", "-"),
    "token": ("#c46ba3", "^", "-"),
    "block": ("#7a2e5d", "D", "-"),
    "multistep": ("#b58900", "v", "-"),
    "recursive": ("#00694e", "P", "-"),
    "traversal": ("#57606a", "X", "-"),
    "typical": ("#d55e00", "o", ":"),
    "soft": ("#6e4a00", "s", ":"),
}


@final
class TemperatureRules(Figure):
    title = "Tokens per pass of every rule against the temperature"
    runs = ("rule",)
    size = (7.6, 4.8)

    def data(self, material: Material) -> Data:
        traces = material.all("rule")
        rows: list[dict[str, Any]] = [
            {
                "rule": trace.header.verify.split(",")[0],
                "temperature": float(trace.header.about["temperature"]),
                **tokens_per_round(trace).row("tokens"),
            }
            for trace in traces
        ]
        rows.sort(key=lambda row: (list(STYLES).index(row["rule"]), row["temperature"]))
        least = min(rows, key=lambda row: row["tokens"])
        about = measured_on(traces[0], what="Tokens per pass").replace(f", temperature {rows[0]['temperature']:g}", "")
        return Data(
            rows,
            about + f" in each run, plan {traces[0].header.plan}; dotted rules change the distribution of the texts; "
            "bars: 95% over texts",
            f"{least['rule']} at temperature {least['temperature']:g}: {least['tokens']:.2f} tokens per pass",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        names = list(dict.fromkeys(row["rule"] for row in data.rows))
        for place, name in enumerate(names):
            rows = [row for row in data.rows if row["rule"] == name]
            colour, marker, line = STYLES[name]
            shown = estimates(rows, "tokens")
            x = [row["temperature"] + 0.008 * (place - len(names) / 2) for row in rows]
            errors = list(zip(*(one.errors for one in shown), strict=True))
            values = [one.value for one in shown]
            axes.errorbar(
                x, values, yerr=errors, color=colour, marker=marker, linestyle=line, label=name, markersize=4,
                linewidth=1.1, elinewidth=0.7,
            )  # fmt: skip
        axes.set_xticks(sorted({row["temperature"] for row in data.rows}))
        axes.set(xlabel="temperature", ylabel="tokens per pass, bonus included")
        legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))
