"""Acceptance length on unseen texts against trained predictions and against minutes, of runs that continue each other.

    python benchmarks/training_curves.py benchmarks/results/train-smollm2-muon.jsonl --output docs/lab/plots

A line of the file is a line of a run's `training/log.jsonl` with the name of its run under `run`. A run continues the
one before it in the file. The printed table has the ends of the runs, and the gain for each doubling of predictions.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError, import_extra
from draftree.core.svg import save_svg

SIZE = (7.2, 3.6)


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluation of a run.

    Attributes:
        run: name of the run.
        predictions: trained so far, those of earlier runs included.
        minutes: duration so far, likewise.
        lengths: acceptance length by temperature of the texts, from every token of the answers.
    """

    run: str
    predictions: int
    minutes: float
    lengths: dict[str, float]


def points_of(lines: Sequence[dict[str, Any]]) -> list[Point]:
    """Return the evaluations of all runs, in order.

    Raises:
        ConfigurationError: the file has none.
    """
    found: list[Point] = []
    before = (0, 0.0)
    for line in (one for one in lines if one["kind"] == "evaluation"):
        if found and found[-1].run != line["run"]:
            before = found[-1].predictions, found[-1].minutes
        lengths = {kind: mode["starts"]["acceptance_length"] for kind, mode in line["modes"].items()}
        found.append(Point(line["run"], before[0] + line["tokens"], before[1] + line["seconds"] / 60, lengths))
    if not found:
        raise ConfigurationError("the file has no evaluations: give the log of a training")
    return found


def ends_of(points: Sequence[Point]) -> list[Point]:
    """Return the last evaluation of each run, where its learning rate has fallen to 0."""
    return [one for one, after in zip(points, [*points[1:], None], strict=True) if not after or after.run != one.run]


def table(points: Sequence[Point]) -> list[str]:
    """Return lines of a table in Markdown: the ends of runs, and gains for each doubling of predictions."""
    kinds = list(points[0].lengths)
    lines = [f"| run | predictions | minutes | {' | '.join(kinds)} |", f"|{' --- |' * (3 + len(kinds))}"]
    ends = ends_of(points)
    for place, one in enumerate(ends):
        cells = [f"{one.lengths[kind]:.2f}" for kind in kinds]
        if place:
            last = ends[place - 1]
            doublings = math.log2(one.predictions / last.predictions)
            gains = [(one.lengths[kind] - last.lengths[kind]) / doublings for kind in kinds]
            cells = [f"{cell} ({gain:+.2f} a doubling)" for cell, gain in zip(cells, gains, strict=True)]
        lines.append(f"| {one.run} | {one.predictions:,} | {one.minutes:.0f} | {' | '.join(cells)} |")
    return lines


def draw(points: Sequence[Point], path: Path) -> None:
    """Write the figure as SVG: on the left against predictions, on the right against minutes.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    matplotlib = import_extra("plots", "plots need", error=ConfigurationError)
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "draftree", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=SIZE, sharey=True, layout="constrained")
    for place, kind in enumerate(points[0].lengths):
        values = [one.lengths[kind] for one in points]
        label = "greedy" if float(kind) == 0 else f"temperature {kind}"
        left.plot([one.predictions / 1e6 for one in points], values, "-o", color=f"C{place}", markersize=3, label=label)
        right.plot([one.minutes for one in points], values, "-o", color=f"C{place}", markersize=3)
    for one in ends_of(points)[:-1]:
        left.axvline(one.predictions / 1e6, color="black", linewidth=0.8, linestyle=":")
        right.axvline(one.minutes, color="black", linewidth=0.8, linestyle=":")
    left.set(xlabel="trained predictions, millions", ylabel="acceptance length on unseen texts")
    right.set(xlabel="minutes of one thread")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_svg(figure, path)
    pyplot.close(figure)


def main() -> None:
    """Print the table and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--output", type=Path, help="folder of the figure; no figure if not given")
    given = parser.parse_args()
    points = points_of([json.loads(line) for line in given.file.read_text(encoding="utf-8").splitlines()])
    print("\n".join(table(points)))
    if given.output:
        draw(points, given.output / f"{given.file.stem}.svg")


if __name__ == "__main__":
    main()
