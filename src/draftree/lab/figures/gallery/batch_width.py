"""Decode tokens per second against the number of concurrent texts, for several lengths of the chain."""

from __future__ import annotations

from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.engine.trace import Trace
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import SERIES, band, legend
from draftree.lab.figures.measures import estimates, measured_on, per_text_seconds, ratio

SHIFT = 1.025
"""Factor between the places of two lines, so that error bars do not hide one another."""


@final
class BatchWidth(Figure):
    title = "Speed against the batch and the length of the chain"
    runs = ("batch",)

    def data(self, material: Material) -> Data:
        traces = material.all("batch")
        rows = sorted((_row(trace) for trace in traces), key=lambda row: (row["length"], row["batch"]))
        plain = {row["batch"]: row["speed"] for row in rows if row["length"] == 0}
        if not plain:
            raise ConfigurationError("the traces of the run 'batch' have none of plain decoding: record one")
        drafted = [row for row in rows if row["length"] and row["batch"] in plain]
        worst = min(drafted, key=lambda row: row["speed"] / plain[row["batch"]])
        least = worst["speed"] / plain[worst["batch"]]
        return Data(
            rows,
            measured_on(traces[-1], what="Decode tokens per second of all texts of the batch together")
            + "; bars: 95% over texts",
            f"length {worst['length']} at batch {worst['batch']}: {least:.2f} of the speed of plain decoding",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        lengths = sorted({row["length"] for row in data.rows})
        for place, length in enumerate(lengths):
            colour, marker, line = SERIES[place % len(SERIES)]
            rows = [row for row in data.rows if row["length"] == length]
            label = "plain decoding" if length == 0 else f"K = {length}"
            x = [row["batch"] * SHIFT ** (place - (len(lengths) - 1) / 2) for row in rows]
            band(axes, x, estimates(rows, "speed"), label=label, colour=colour, marker=marker, line=line)
        axes.set_xscale("log", base=2)
        batches = sorted({row["batch"] for row in data.rows})
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set(xlabel="concurrent texts", ylabel="decode tokens per second", ylim=(0, None))
        legend(axes)


def _row(trace: Trace) -> dict[str, Any]:
    spent, written = per_text_seconds(trace)
    batch = int(trace.header.about["batch"])
    length = 0 if trace.header.draft == "none" else int(trace.header.plan.partition(":")[2])
    # the share of a text in the seconds of a round is one part in as many as the round has texts
    return {"batch": batch, "length": length, **ratio(written, spent).row("speed")}
