"""Figures of results files: speed, rounds, temperatures, rules, tree passes. Needs the extra `plots`; no torch."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.lab.analysis.theory import CHILDREN
from draftree.lab.bench.records import DistributionRecord, Results
from draftree.lab.bench.summary import PHASES, MethodSummary, Ratio, Report
from draftree.lab.bench.tables import WAYS, doubts, hit_rates, mean_kept, provenance_line
from draftree.lab.figures.drawing import INK, SERIES, legend, write_sheet

SIZE = (6.8, 4.2)
PHASE_COLOURS = dict(zip(PHASES, (INK["other"], INK["good"], INK["measured"], "#b58900", INK["theory"]), strict=True))


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure of some results."""

    sources: Sequence[Results]
    name: str
    title: str
    draw: Callable[[Any], None]


def draw_all(results: Sequence[Results], folder: Path) -> list[Path]:
    """Write every figure that these files have data for, as SVG, PNG and PDF; returns the paths."""
    drawn: list[Path] = []
    for plot in _plots(results):
        notes = [note for source in plot.sources for note in (provenance_line(source), *doubts(source))]
        drawn += write_sheet(plot.draw, folder / plot.name, title=plot.title, notes=notes, size=SIZE)
    if not drawn:
        raise ConfigurationError(
            "these files have no data for plots: give runs of several temperatures, or results of "
            "benchmarks/distributions.py or benchmarks/trees.py"
        )
    return drawn


def _plots(results: Sequence[Results]) -> Iterator[Plot]:
    sources = [result for result in results if result.distributions]
    categories: dict[str, list[DistributionRecord]] = {}
    for record in sorted((record for result in sources for record in result.distributions), key=_temperature):
        categories.setdefault(record.category, []).append(record)
    for category, records in categories.items():
        groups = {temperature: list(part) for temperature, part in itertools.groupby(records, _temperature)}
        draw = partial(_draw_guesses, groups=groups)
        yield Plot(sources, f"guesses-{category}", f"Target token among the first guesses: {category}", draw)
        draw = partial(_draw_rules, groups=groups)
        yield Plot(sources, f"rules-{category}", f"Acceptance of a node by rule: {category}", draw)
    texts = [result for result in results if result.records]
    for result in texts:
        name = result.name.removesuffix(".jsonl")
        report = Report(result)
        draw = partial(_draw_speed, rows=report.rows())
        yield Plot([result], f"{name}-speed", "Decode speed-up over plain decoding", draw)
        draw = partial(_draw_rounds, rounds=report.round_milliseconds())
        yield Plot([result], f"{name}-rounds", "Time of a round by phase", draw)
    # runs with the most common set of methods, by temperature
    methods = [tuple(sorted(method["name"] for method in result.header["methods"])) for result in texts]
    most = max(set(methods), key=methods.count, default=())
    same = {result.header["temperature"]: result for result, names in zip(texts, methods, strict=True) if names == most}
    if len(same) > 1:
        sources = [result for _, result in sorted(same.items())]
        rows = {result.header["temperature"]: Report(result).rows() for result in sources}
        draw = partial(_draw_temperature, groups=rows, label="tokens per round", value=_length)
        yield Plot(sources, "temperature-length", "Acceptance length by temperature", draw)
        draw = partial(_draw_temperature, groups=rows, label="speed-up over plain decoding", value=_speed)
        yield Plot(sources, "temperature-speed", "Decode speed-up by temperature", draw)
    for result in results:
        if any(tree.how in WAYS for tree in result.trees):
            name = f"{result.name.removesuffix('.jsonl')}-scoring"
            yield Plot([result], name, "Time of a pass over a drafted tree", partial(_draw_scoring, result=result))


def _temperature(record: DistributionRecord) -> float:
    return record.temperature


def _length(row: MethodSummary) -> float:
    return row.acceptance_length


def _speed(row: MethodSummary) -> float:
    return float("nan") if row.against_plain is None else row.against_plain.median


def _draw_guesses(sheet: Any, *, groups: dict[float, list[DistributionRecord]]) -> None:
    axes = sheet.subplots()
    for (temperature, part), series in zip(groups.items(), _series(), strict=False):
        rates = hit_rates(part)[:5]
        axes.plot(
            range(1, len(rates) + 1), list(itertools.accumulate(rates)), label=f"temperature {temperature:g}", **series
        )
    axes.set(xlabel="first guesses of the drafter", ylabel="share with the target token", ylim=(0, 1))
    axes.set_xticks(range(1, 6))
    _finish(axes)


CURVES = (
    ("coupled", 1, "C0:"),
    ("coupled", 4, "C0-"),
    ("token", 1, "C1:"),
    ("recursive", 4, "C1-"),
    ("multistep", 4, "C2-"),
    ("match", 1, "C3:"),
    ("match", 4, "C3-"),
    ("likeliest", 1, "C4:"),
    ("likeliest", 4, "C4-"),
)
"""Rule, number of children, and style of each curve."""


def _draw_rules(sheet: Any, *, groups: dict[float, list[DistributionRecord]]) -> None:
    axes = sheet.subplots()
    for rule, children, style in CURVES:
        place = CHILDREN.index(children)
        values = [
            sum(hit_rates(part)[:4]) if (rule, children) == ("coupled", 4) else mean_kept(part, rule, place)
            for part in groups.values()
        ]
        axes.plot(list(groups), values, style, label=f"{rule}, {children}")
    axes.set(xlabel="temperature", ylabel="probability that a child is accepted", ylim=(0, 1))
    _finish(axes)


def _draw_speed(sheet: Any, *, rows: Sequence[MethodSummary]) -> None:
    """Draw bars of medians, with the quartiles of the prompts as intervals."""
    axes = sheet.subplots()
    rows = [row for row in rows if row.against_plain is not None and row.method["job"] != "plain"] or list(rows)
    names = [_short(row.method["name"]) for row in rows]
    ratios = [row.against_plain or Ratio(0.0, 0.0, 0.0) for row in rows]
    values = [ratio.median for ratio in ratios]
    lows = [max(0.0, ratio.median - ratio.low) for ratio in ratios]
    highs = [max(0.0, ratio.high - ratio.median) for ratio in ratios]
    colours = [INK["measured"] if value >= 1 else INK["losing"] for value in values]
    axes.barh(names, values, xerr=(lows, highs), color=colours, ecolor=INK["theory"], capsize=2, height=0.6)
    axes.axvline(1.0, color=INK["theory"], linewidth=0.8)
    for place, (row, value, high) in enumerate(zip(rows, values, highs, strict=True)):
        label = f"  {value:.2f}, {row.acceptance_length:.2f} tokens per round"
        axes.text(value + high, place, label, va="center", fontsize=7.5)
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    widest = max(map(sum, zip(values, highs, strict=True)))
    axes.set(xlabel="speed-up; intervals: quartiles over prompts", xlim=(0, 1.8 * widest))


def _draw_rounds(sheet: Any, *, rounds: dict[str, dict[str, float]]) -> None:
    axes = sheet.subplots()
    names = [_short(name) for name in rounds]
    left = [0.0] * len(names)
    for phase in PHASES:
        values = [times[phase] for times in rounds.values()]
        axes.barh(names, values, left=left, label=phase, color=PHASE_COLOURS[phase], height=0.6)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds per round")
    axes.grid(visible=False, axis="y")
    legend(axes, ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_temperature(
    sheet: Any, groups: dict[float, list[MethodSummary]], label: str, value: Callable[[MethodSummary], float]
) -> None:
    axes = sheet.subplots()
    names = [row.method["name"] for row in next(iter(groups.values())) if row.method["job"] != "plain"]
    for name, series in zip(names, _series(), strict=False):
        points = {t: value(row) for t, rows in groups.items() for row in rows if row.method["name"] == name}
        axes.plot(list(points), list(points.values()), label=_short(name), **series)
    axes.set(xlabel="temperature", ylabel=label)
    _finish(axes)


def _draw_scoring(sheet: Any, *, result: Results) -> None:
    axes = sheet.subplots()
    shapes = list(dict.fromkeys(tree.shape for tree in result.trees if tree.how in WAYS))
    for place, how in enumerate(WAYS):
        values = [
            statistics.median_high(tree.milliseconds)
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


def _series() -> Iterator[dict[str, Any]]:
    """Yield colour, marker and line of one line of a drawing after another."""
    for colour, marker, line in itertools.cycle(SERIES):
        yield {"color": colour, "marker": marker, "linestyle": line, "markersize": 4, "linewidth": 1.2}


def _finish(axes: Any) -> None:
    legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))
