"""Milliseconds per token against the round-trip time to the target, with and without drafts on the device.

Beside the measured points: the straight line through the shortest and the longest round trip. It rises by one round
trip per so many tokens; the points between show whether the time per token is linear in the round trip.
"""

from __future__ import annotations

from typing import Any, final

from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import SERIES, band, legend
from draftree.lab.figures.measures import estimates, mean

ARMS = {"drafts": "drafts on the device", "streams": "streamed by the server"}
"""Arms of the measurement in words."""


@final
class Rtt(Figure):
    title = "Milliseconds per token against the round-trip time"
    results = ("round trip",)

    def data(self, material: Material) -> Data:
        lines = [line for _, line in material.lines(part="round trip")]
        rows: list[dict[str, Any]] = [
            {"arm": line["arm"], "rtt_ms": line["rtt_ms"], **mean(line["ms_per_token_by_prompt"]).row("ms_per_token")}
            for line in lines
        ]
        rows.sort(key=lambda row: (row["arm"], row["rtt_ms"]))
        for row in rows:
            row["tokens_per_trip"] = _tokens(rows, row["arm"])
        first = lines[0]
        worst = max(rows, key=lambda row: row["ms_per_token"])
        other = min((r for r in rows if r["rtt_ms"] == worst["rtt_ms"]), key=lambda row: row["ms_per_token"])
        beside = "" if other is worst else f"; {ARMS.get(other['arm'], other['arm'])} {other['ms_per_token']:.0f} ms"
        return Data(
            rows,
            f"Mean over {first['prompts']} texts of {first['tokens']} tokens: {first['model']}, drafter "
            f"{first['draft']} on the device, delay added on the way, {first['machine']['cpu']}; bars: 95% over texts",
            f"{ARMS.get(worst['arm'], worst['arm'])} at {worst['rtt_ms']:g} ms: {worst['ms_per_token']:.0f} ms per "
            f"token{beside}",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        for arm, (colour, marker, _) in zip(dict.fromkeys(row["arm"] for row in data.rows), SERIES, strict=False):
            rows = [row for row in data.rows if row["arm"] == arm]
            x = [row["rtt_ms"] for row in rows]
            named = ARMS.get(arm, arm)
            band(axes, x, estimates(rows, "ms_per_token"), label=named, colour=colour, marker=marker)
            tokens = rows[0]["tokens_per_trip"]
            line = [rows[0]["ms_per_token"] + (rtt - x[0]) / tokens for rtt in x]
            axes.plot(x, line, linestyle="--", color=colour, alpha=0.6, label=f"one round trip per {tokens:.2f} tokens")
        axes.set(xlabel="round-trip time (ms)", ylabel="milliseconds per token", ylim=(0, None))
        legend(axes)


def _tokens(rows: list[dict[str, Any]], arm: str) -> float:
    """Return the tokens per round trip that follow from the shortest and the longest one."""
    mine = [row for row in rows if row["arm"] == arm]
    rise = mine[-1]["ms_per_token"] - mine[0]["ms_per_token"]
    return float((mine[-1]["rtt_ms"] - mine[0]["rtt_ms"]) / rise) if rise > 0 else float("inf")
