"""Plots of results files of several runs. Needs the extra `plots`; no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftree.bench.dark_svg import save_svg
from draftree.bench.records import DistributionRecord, Results
from draftree.bench.replay import hit_rates, mean_kept
from draftree.bench.summary import PHASES, Report, Row
from draftree.bench.tree_tables import WAYS
from draftree.core.errors import ConfigurationError
from draftree.core.extras import import_extra

SIZE = (6.4, 4.0)
MARKERS = "osD^v<>pXP*h"


def draw_all(results: Sequence[Results], folder: Path) -> list[Path]:
    """Write every plot that these files have data for, as SVG; returns the paths.

    Raises:
        ConfigurationError: matplotlib is not installed, or no file has data for a plot.
    """
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    for name, draw in _plots(results):
        figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
        draw(axes)
        path = folder / f"{name}.svg"
        save_svg(figure, path)
        pyplot.close(figure)
        drawn.append(path)
    if not drawn:
        raise ConfigurationError(
            "these files have no data for plots: give runs of several temperatures, or results of "
            "benchmarks/distributions.py or benchmarks/trees.py"
        )
    return drawn


def _pyplot() -> Any:
    matplotlib = import_extra("plots", "plots need", error=ConfigurationError)
    matplotlib.use("svg")
    # fixed ids instead of random ones, and text as text: equal numbers give equal small files
    matplotlib.rcParams.update({"svg.hashsalt": "draftree", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def _plots(results: Sequence[Results]) -> Iterable[tuple[str, Callable[[Any], None]]]:
    distributions = [record for result in results for record in result.distributions]
    for category in dict.fromkeys(record.category for record in distributions):
        part = [record for record in distributions if record.category == category]
        yield f"guesses-{category}", partial(_draw_guesses, records=part)
        yield f"rules-{category}", partial(_draw_rules, records=part)
    texts = [result for result in results if result.records]
    for result in texts:
        name = result.name.removesuffix(".jsonl")
        yield f"{name}-speed", partial(_draw_speed, rows=Report(result).rows())
        yield f"{name}-rounds", partial(_draw_rounds, rounds=Report(result).round_milliseconds())
    by_temperature = _over_temperature(texts)
    if len(by_temperature) > 1:
        yield (
            "temperature-length",
            partial(_draw_temperature, groups=by_temperature, label="tokens per round", value=_length),
        )
        yield "temperature-speed", partial(_draw_temperature, groups=by_temperature, label="speed-up", value=_speed)
    for result in results:
        if any(tree.how in WAYS for tree in result.trees):
            yield f"{result.name.removesuffix('.jsonl')}-scoring", partial(_draw_scoring, result=result)


def _over_temperature(texts: Sequence[Results]) -> dict[float, list[Row]]:
    """Return rows by temperature, of the runs with the most common set of methods."""
    methods = [tuple(sorted(method["name"] for method in result.header["methods"])) for result in texts]
    most = max(set(methods), key=methods.count, default=())
    found = {
        result.header["temperature"]: Report(result).rows()
        for result, names in zip(texts, methods, strict=True)
        if names == most
    }
    return dict(sorted(found.items()))


def _length(row: Row) -> float:
    return row.acceptance_length


def _speed(row: Row) -> float:
    return float("nan") if row.against_plain is None else row.against_plain.mean


def _by_temperature(records: Sequence[DistributionRecord]) -> dict[float, list[DistributionRecord]]:
    found: dict[float, list[DistributionRecord]] = {}
    for record in sorted(records, key=lambda record: record.temperature):
        found.setdefault(record.temperature, []).append(record)
    return found


def _draw_guesses(axes: Any, *, records: Sequence[DistributionRecord]) -> None:
    for (temperature, part), marker in zip(_by_temperature(records).items(), MARKERS, strict=False):
        rates = hit_rates(part)[:5]
        cumulated = [sum(rates[: rank + 1]) for rank in range(len(rates))]
        axes.plot(range(1, len(rates) + 1), cumulated, marker=marker, label=f"temperature {temperature:g}")
    axes.set(xlabel="first guesses of the drafter", ylabel="share with the target's pick", ylim=(0, 1))
    axes.set_xticks(range(1, 6))
    _finish(axes)


def _draw_rules(axes: Any, *, records: Sequence[DistributionRecord]) -> None:
    groups = _by_temperature(records)
    curves: list[tuple[str, Callable[[list[DistributionRecord]], float], str]] = [
        ("coupled, 1", lambda part: mean_kept(part, "coupled"), "C0:"),
        ("coupled, 4", lambda part: sum(hit_rates(part)[:4]), "C0-"),
        ("token, 1", lambda part: mean_kept(part, "token"), "C1:"),
        ("recursive, 4", lambda part: mean_kept(part, "recursive", 2), "C1-"),
        ("multistep, 4", lambda part: mean_kept(part, "multistep", 2), "C2-"),
        ("match, 1", lambda part: mean_kept(part, "match"), "C3:"),
        ("match, 4", lambda part: mean_kept(part, "match", 2), "C3-"),
        ("likeliest, 1", lambda part: mean_kept(part, "likeliest"), "C4:"),
        ("likeliest, 4", lambda part: mean_kept(part, "likeliest", 2), "C4-"),
    ]
    for label, value, style in curves:
        axes.plot(list(groups), [value(part) for part in groups.values()], style, label=label)
    axes.set(xlabel="temperature", ylabel="probability that a child is accepted", ylim=(0, 1))
    _finish(axes)


def _draw_speed(axes: Any, *, rows: Sequence[Row]) -> None:
    names = [_short(row.method["name"]) for row in rows]
    values = [row.against_plain.mean if row.against_plain else 0.0 for row in rows]
    axes.barh(names, values, color="C0")
    axes.axvline(1.0, color="black", linewidth=0.8)
    for place, (value, row) in enumerate(zip(values, rows, strict=True)):
        axes.text(value, place, f" {value:.2f} ({row.acceptance_length:.2f})", va="center")
    axes.invert_yaxis()
    axes.set(xlabel="speed-up over plain (tokens per round)", xlim=(0, 1.25 * max(values)))


def _draw_rounds(axes: Any, *, rounds: dict[str, dict[str, float]]) -> None:
    names = [_short(name) for name in rounds]
    left = [0.0] * len(names)
    for phase in PHASES:
        values = [times[phase] for times in rounds.values()]
        axes.barh(names, values, left=left, label=phase)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds per round")
    axes.legend(frameon=False, ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_temperature(axes: Any, groups: dict[float, list[Row]], label: str, value: Callable[[Row], float]) -> None:
    names = [row.method["name"] for row in next(iter(groups.values())) if row.method["job"] != "plain"]
    for name, marker in zip(names, MARKERS * len(names), strict=False):
        points = {t: value(row) for t, rows in groups.items() for row in rows if row.method["name"] == name}
        axes.plot(list(points), list(points.values()), marker=marker, label=_short(name))
    axes.set(xlabel="temperature", ylabel=label)
    _finish(axes)


def _draw_scoring(axes: Any, *, result: Results) -> None:
    shapes = list(dict.fromkeys(tree.shape for tree in result.trees if tree.how in WAYS))
    for place, how in enumerate(WAYS):
        values = [
            sorted(tree.milliseconds)[len(tree.milliseconds) // 2]
            for shape in shapes
            for tree in result.trees
            if (tree.shape, tree.how) == (shape, how)
        ]
        axes.bar([x + 0.2 * place for x in range(len(shapes))], values, 0.2, label=how)
    axes.set_xticks([x + 0.3 for x in range(len(shapes))], shapes, rotation=20)
    axes.set(ylabel="milliseconds", yscale="log")
    _finish(axes)


def _short(name: str) -> str:
    """Return a name without the drafter's model, which is the same for all."""
    head, _, rest = name.partition(",")
    return rest if head.startswith("model:") and rest else name


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
