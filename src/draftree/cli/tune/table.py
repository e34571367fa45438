"""The table of `draftree tune`: measured and predicted results side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftree.lab.tune.contest import Standing

__all__ = ["table"]

NOTHING = "–"


def table(standings: Sequence[Standing], predicted: Sequence[Standing] = ()) -> list[str]:
    """Return the lines of the table.

    Args:
        standings: results of measured drafters.
        predicted: results of replayed ones; their columns are left out if there are none.
    """
    replayed = {one.candidate.name: one for one in predicted}
    only_replayed = [one for one in predicted if one.candidate.name not in {s.candidate.name for s in standings}]
    rows: list[tuple[str, ...]] = [
        (*measured_cells(one), *predicted_cells(replayed.get(one.candidate.name)), one.out) for one in standings
    ]
    rows += [(shown_name(one), *[NOTHING] * 6, *predicted_cells(one), one.out) for one in only_replayed]
    head: tuple[str, ...] = (
        "drafter",
        "texts",
        "tokens/s",
        "speed-up",
        "median",
        "quartiles",
        "accepted",
        "predicted",
        "replayed",
        "",
    )
    if not replayed:
        head, rows = (*head[:7], head[9]), [(*row[:7], row[9]) for row in rows]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(f"{value:<{width}}" for value, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def shown_name(one: Standing) -> str:
    return "plain" if one.candidate.is_plain else one.candidate.name


def measured_cells(one: Standing) -> tuple[str, ...]:
    return (
        shown_name(one),
        str(one.texts),
        f"{one.tokens_per_second:.1f}",
        f"{one.speedup:.2f}",
        f"{one.median:.2f}",
        f"{one.low:.2f}–{one.high:.2f}",
        f"{one.acceptance_length:.2f}",
    )


def predicted_cells(one: Standing | None) -> tuple[str, str]:
    """Return the predicted speed-up, and the tokens per round in replays."""
    return (NOTHING, NOTHING) if one is None else (f"{one.speedup:.2f}", f"{one.acceptance_length:.2f}")
