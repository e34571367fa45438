"""Plots of a training run: loss, acceptance by depth over tokens and minutes. Needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError, import_extra
from draftree.core.svg import save_svg

__all__ = ["draw_run"]

Draw = Callable[[Any, Sequence[dict[str, Any]]], None]
SIZE = (6.4, 4.0)
AVERAGED = 40
"""Points of the curves of losses: successive updates are averaged to so many."""


def draw_run(log: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write the plots of a log as SVG; return their paths.

    Args:
        log: lines of `log.jsonl`.
        folder: created if it does not exist.

    Raises:
        ConfigurationError: matplotlib is not installed, or the log has no update.
    """
    updates = [line for line in log if line["kind"] == "update" and line["levels"]]
    evaluations = [line for line in log if line["kind"] == "evaluation"]
    if not updates:
        raise ConfigurationError("the log has no update: there is nothing to plot")
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    figures: list[tuple[str, Draw, list[dict[str, Any]]]] = [
        ("loss", _draw_loss, updates),
        ("training-acceptance", _draw_acceptance, updates),
    ]
    if evaluations:
        figures.append(("unseen-acceptance", _draw_unseen, evaluations))
        figures.append(("acceptance-length", _draw_length, evaluations))
    paths = []
    for name, draw, lines in figures:
        figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
        draw(axes, lines)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        paths.append(folder / f"{name}.svg")
        save_svg(figure, paths[-1])
        pyplot.close(figure)
    return paths


def _pyplot() -> Any:
    matplotlib = import_extra("plots", "plots need", error=ConfigurationError)
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "draftree", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def _curves(updates: Sequence[dict[str, Any]], key: str) -> list[tuple[list[float], list[float]]]:
    """Return tokens and means of a sum for each level, averaged over successive updates."""
    size = max(1, len(updates) // AVERAGED)
    found: list[tuple[list[float], list[float]]] = []
    for start in range(0, len(updates), size):
        part = updates[start : start + size]
        for level in range(max(len(line["levels"]) for line in part)):
            if level == len(found):
                found.append(([], []))
            rows = [line["levels"][level] for line in part if len(line["levels"]) > level]
            count = sum(row["count"] for row in rows)
            if count:
                found[level][0].append(part[-1]["tokens"])
                found[level][1].append(sum(row[key] for row in rows) / count)
    return found


def _draw_loss(axes: Any, updates: Sequence[dict[str, Any]]) -> None:
    for level, (tokens, values) in enumerate(_curves(updates, "loss")):
        axes.plot(tokens, values, label=f"level {level + 1}")
    names = [line["loss_name"] for line in updates]
    for place in range(1, len(names)):
        if names[place] != names[place - 1]:
            axes.axvline(updates[place]["tokens"], color="black", linewidth=0.8, linestyle=":")
            axes.annotate(f" {names[place]}", (updates[place]["tokens"], axes.get_ylim()[1]), va="top")
    axes.set(xlabel="trained predictions", ylabel="loss")


def _draw_acceptance(axes: Any, updates: Sequence[dict[str, Any]]) -> None:
    for level, (tokens, values) in enumerate(_curves(updates, "accepted")):
        axes.plot(tokens, values, label=f"level {level + 1}")
    axes.set(xlabel="trained predictions", ylabel="sum of min(p, q) in training", ylim=(0, 1))


def _draw_unseen(axes: Any, evaluations: Sequence[dict[str, Any]]) -> None:
    tokens = [line["tokens"] for line in evaluations]
    for style, temperature in zip(("-o", "--s", ":^"), sorted(evaluations[0]["modes"]), strict=False):
        rates = [line["modes"][temperature]["starts"]["conditional"] for line in evaluations]
        for depth in range(len(rates[0])):
            label = f"temperature {temperature}, depth {depth + 1}"
            axes.plot(tokens, [row[depth] for row in rates], style, color=f"C{depth}", markersize=3, label=label)
    axes.set(xlabel="trained predictions", ylabel="conditional acceptance on unseen texts", ylim=(0, 1))


def _draw_length(axes: Any, evaluations: Sequence[dict[str, Any]]) -> None:
    minutes = [line["seconds"] / 60 for line in evaluations]
    for temperature in sorted(evaluations[0]["modes"]):
        values = [line["modes"][temperature]["starts"]["acceptance_length"] for line in evaluations]
        axes.plot(minutes, values, "-o", markersize=3, label=f"temperature {temperature}")
    axes.set(xlabel="minutes", ylabel="acceptance length on unseen texts")
