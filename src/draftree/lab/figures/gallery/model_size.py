"""Milliseconds of a pass by its rows, for models of several sizes: what a wider pass costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import SERIES, legend
from draftree.lab.figures.measures import spread


@final
class ModelSize(Figure):
    title = "Time of a pass by model size and width"
    results = ("pass",)
    size = (9.0, 4.4)

    def data(self, material: Material) -> Data:
        lines = material.lines(kind="pass")
        rows = [_row(header, line) for header, line in lines]
        rows.sort(key=lambda row: (row["weight_bytes"], row["rows"]))
        relative(rows)
        worst = max(rows, key=lambda row: row["relative"])
        cpus = sorted({header["machine"]["cpu"] for header, _ in lines})
        dtypes = sorted({header["dtype"] for header, _ in lines})
        repeats = min(len(line["milliseconds"]) for _, line in lines)
        return Data(
            rows,
            f"Milliseconds of a pass over a chain, {', '.join(dtypes)}, {', '.join(cpus)}; median of at least "
            f"{repeats} passes, bars: quartiles over passes (there are no texts)",
            f"{worst['rows']} rows of {worst['model']} take {worst['relative']:.2f} times one row",
        )

    def draw(self, figure: Any, data: Data) -> None:
        left, right = figure.subplots(1, 2)
        names = dict.fromkeys((row["model"], row["cpu"]) for row in data.rows)
        for (name, cpu), (colour, marker, line) in zip(names, SERIES * 3, strict=False):
            rows = [row for row in data.rows if (row["model"], row["cpu"]) == (name, cpu)]
            x = [row["rows"] for row in rows]
            values = [row["milliseconds"] for row in rows]
            label = f"{name}, {rows[0]['weight_bytes'] / 1e6:.0f} MB"
            left.errorbar(
                x,
                values,
                yerr=spread(rows, "milliseconds"),
                marker=marker,
                linestyle=line,
                markersize=3,
                color=colour,
                label=label,
                capsize=2,
            )
            right.plot(x, [row["relative"] for row in rows], marker=marker, linestyle=line, markersize=3, color=colour)
        most = max(row["rows"] for row in data.rows)
        ticks = [2**power for power in range(most.bit_length()) if 2**power <= most]
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xlabel("rows of the pass: tokens that it computes")
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
        left.set_yscale("log")
        left.set_ylabel("milliseconds of a pass")
        left.yaxis.set_major_formatter("{x:g}")
        right.set_ylabel("time / time of one row")
        right.set_ylim(0, None)
        legend(left)


def _row(header: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    low, middle, high = np.quantile(line["milliseconds"], (0.25, 0.5, 0.75))
    return {
        "model": header["model"]["name"],
        "cpu": header["machine"]["cpu"],
        "weight_bytes": header["weight_bytes"],
        "rows": line["rows"],
        "milliseconds": float(middle),
        "milliseconds_low": float(low),
        "milliseconds_high": float(high),
        "relative": 0.0,
    }


def relative(rows: Sequence[dict[str, Any]]) -> None:
    """Fill in the time relative to the pass with the fewest rows of the same model and processor."""
    for row in rows:
        same = [other for other in rows if (other["model"], other["cpu"]) == (row["model"], row["cpu"])]
        row["relative"] = row["milliseconds"] / min(same, key=lambda other: other["rows"])["milliseconds"]
