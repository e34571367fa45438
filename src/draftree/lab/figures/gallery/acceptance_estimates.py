"""Acceptance of a drafted token: measured under shared noise, and the closed forms sum of min and J.

For target T and drafter D, `sum min(T, D)` is the acceptance of rejection sampling and the upper bound of any rule;
`J = sum_i 1 / sum_j max(T_j / T_i, D_j / D_i)` is that of shared noise. Source: arXiv 2211.17192; arXiv 2408.07978.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, band, dodged, legend
from draftree.lab.figures.measures import estimates, mean, ratio

RULES = {"j": "coupled", "sum_min": "token"}
LINES = {
    "measured": ("measured, shared noise", INK["measured"], "o", "-"),
    "j": ("J: the closed form of shared noise", INK["other"], "s", "--"),
    "sum_min": ("Σ min(T, D): the bound of every rule", INK["theory"], "^", ":"),
}


@final
class AcceptanceEstimates(Figure):
    title = "Acceptance of one drafted token: measured, and its estimates"
    results = ("distribution",)

    def data(self, material: Material) -> Data:
        lines = material.lines(kind="distribution")
        header = lines[0][0]
        groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
        for _, line in lines:
            groups.setdefault((line["category"], line["temperature"]), []).append(line)
        rows: list[dict[str, Any]] = [
            {"category": name, "temperature": t, **_row(part)} for (name, t), part in sorted(groups.items())
        ]
        least = min(rows, key=lambda row: row["measured"])
        return Data(
            rows,
            "Share of positions at which drafter and target choose the same token, over "
            f"{len({line['task'] for _, line in lines})} texts of "
            f"{header['max_tokens']} tokens: {header['model']['name']} drafted by {header['draft_models'][0]['name']}, "
            f"{header['dtype']}, noise of {header['draws']} seeds; bars: 95% over texts",
            f"{least['category']} at temperature {least['temperature']:g}: {least['measured']:.2f} of the drafted "
            "tokens are accepted",
        )

    def draw(self, figure: Any, data: Data) -> None:
        names = list(dict.fromkeys(row["category"] for row in data.rows))
        for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
            rows = [row for row in data.rows if row["category"] == name]
            x = [row["temperature"] for row in rows]
            for place, (key, (label, colour, marker, line)) in enumerate(LINES.items()):
                shown = estimates(rows, key)
                places = dodged(x, place, len(LINES), step=0.02)
                band(axes, places, shown, label=label, colour=colour, marker=marker, line=line)
            axes.set(title=name, xlabel="temperature", ylim=(0, 1))
        figure.axes[0].set_ylabel("acceptance α")
        legend(figure.axes[0], loc="upper left")


def _row(part: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    measured = ratio([line["shared_hits"][0] for line in part], [line["num_positions"] for line in part])
    closed = {name: mean([_mean_kept(line, rule) for line in part]) for name, rule in RULES.items()}
    found = {"texts": len(part), **measured.row("measured")}
    for name, estimate in closed.items():
        found |= estimate.row(name)
    return found


def _mean_kept(line: Mapping[str, Any], rule: str) -> float:
    """Return the mean over positions of the probability that one child is accepted."""
    first = [kept[0] for kept in line["kept"][rule]]
    return float(sum(first) / len(first))
