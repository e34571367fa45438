"""Pass times by number of sequences, prefix length and rows."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from draftree.core.svg import save_svg
from draftree.models.base import Commit, Extend, Pass


def measure(given: argparse.Namespace, loaded: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """A pass of the target over so many sequences, with so many tokens before them and so many rows of each."""
    model = loaded.model
    grid = [(batch, 256, 1) for batch in (1, 2, 4, 8, 16, 32)]
    grid += [(batch, 256, 8) for batch in (1, 2, 4, 8, 16)]
    grid += [(1, prefix, 8) for prefix in (32, 128, 512, 1024)]
    grid += [(1, 256, rows) for rows in (2, 4, 16, 32, 64)]
    for batch, prefix, rows in grid:
        slots = [model.open() for _ in range(batch)]
        for slot in slots:
            model.run(Pass([Extend(slot, [0] * prefix, range(-1, prefix - 1), logits_at=())]))
            model.commit(slot, range(prefix))
        seconds = []
        for _ in range(2 + 5):
            start = time.perf_counter()
            model.run(Pass([Extend(slot, [0] * rows, range(-1, rows - 1)) for slot in slots]))
            seconds.append(time.perf_counter() - start)
            model.apply([Commit(slot, ()) for slot in slots])
        for slot in slots:
            model.close(slot)
        milliseconds = [1000 * value for value in seconds[2:]]
        yield {"batch": batch, "prefix": prefix, "rows": rows, "milliseconds": milliseconds}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians, one line for each kind of pass."""
    lines = ["| sequences | tokens before | rows of each | milliseconds |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['batch']} | {row['prefix']} | {row['rows']} | {statistics.median(row['milliseconds']):.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Three panels: by sequences, by prefix length, by rows."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True)
    choices: list[tuple[str, str, Callable[[dict[str, Any]], bool], str]] = [
        ("batch", "sequences", lambda row: row["prefix"] == 256 and row["rows"] == 1, "1 row each"),
        ("batch", "sequences", lambda row: row["prefix"] == 256 and row["rows"] == 8, "8 rows each"),
        ("prefix", "tokens before", lambda row: row["batch"] == 1 and row["rows"] == 8, "1 sequence, 8 rows"),
        ("rows", "rows of one sequence", lambda row: row["batch"] == 1 and row["prefix"] == 256, "256 tokens before"),
    ]
    for (key, label, wanted, name), panel in zip(choices, [panels[0], panels[0], panels[1], panels[2]], strict=True):
        points = sorted((row[key], statistics.median(row["milliseconds"])) for row in rows if wanted(row))
        panel.plot(*zip(*points, strict=True), marker="o", label=name)
        panel.set_xlabel(label)
        panel.legend()
    panels[0].set_ylabel("milliseconds of a pass")
    panels[0].set_ylim(bottom=0)
    figure.tight_layout()
    save_svg(figure, file)
