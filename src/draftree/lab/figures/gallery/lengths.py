"""The length of a chain: expected tokens, speed, operations, and the best length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.core.tree import depths
from draftree.engine.trace import Trace
from draftree.lab.analysis.theory import best_length, expected_tokens, operations_factor, walltime_improvement
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, SERIES, band, grouped, heat_map, legend
from draftree.lab.figures.measures import (
    BARS,
    acceptance,
    acceptances,
    chain,
    decode_rounds,
    deepest,
    measured_on,
    per_text_seconds,
    ratio,
    replay,
    texts_of,
    tokens_per_pass,
    watched,
    worst_text,
)

CURVES = (0.5, 0.7, 0.9)


@final
class ExpectedTokens(Figure):
    """Tokens per pass of a chain against its length, beside the closed form (1 - α^(K + 1)) / (1 - α).

    Source: arXiv 2211.17192, equation 1. The closed form assumes that all drafted tokens have the same acceptance,
    independently of one another.
    """

    title = "Tokens per pass of a drafted chain, beside the closed form"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace, texts = watched(material)
        alpha = acceptance(texts)
        rows = [
            {
                "length": length,
                **tokens_per_pass([replay(text, chain(length)) for text in texts]).row("measured"),
                "closed_form": expected_tokens(alpha.value, length),
                "acceptance": alpha.value,
            }
            for length in range(deepest(texts) + 1)
        ]
        return Data(
            rows,
            measured_on(trace, what="Exact replay of chains") + f"; α = {alpha.value:.3f} "
            f"({alpha.low:.3f} to {alpha.high:.3f}) of the first drafted token{BARS}",
            worst_text(texts, chain(len(rows) - 1), "the longest chain", text_of=trace.text_of),
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        x = [row["length"] for row in data.rows]
        alpha = data.rows[0]["acceptance"]
        for other in CURVES:
            axes.plot(x, [expected_tokens(other, k) for k in x], color=INK["theory"], alpha=0.35, linewidth=0.8)
            style = {"textcoords": "offset points", "va": "center", "fontsize": 7, "color": INK["theory"]}
            axes.annotate(f"α = {other}", (x[-1], expected_tokens(other, x[-1])), (5, 0), **style)
        closed = [row["closed_form"] for row in data.rows]
        axes.plot(x, closed, color=INK["theory"], linestyle="--", label=f"closed form at α = {alpha:.3f}")
        band(axes, x, data.rows, "measured", label="measured")
        axes.set(xlabel="length K of the chain", ylabel="tokens per pass, bonus included", xlim=(-0.2, x[-1] + 0.5))
        axes.set_xticks(x)
        legend(axes)


@final
class Walltime(Figure):
    """Speed-up against the length of the chain, timed, beside (1 - α^(K + 1)) / ((1 - α) (K c + 1)).

    Source: arXiv 2211.17192, theorem 3.8. The closed form assumes equal and independent acceptance, and that a pass
    over K + 1 tokens takes as long as one over one token.
    """

    title = "Wall-time improvement against the length of the chain"
    runs = ("plain", "length")

    def data(self, material: Material) -> Data:
        plain = material.one("plain")
        traces = sorted(material.all("length"), key=length_of)
        drafted = [
            step for trace in traces for traced_round in trace.rounds for step in traced_round.steps if len(step.scored)
        ]
        alpha = sum(bool(step.path) for step in drafted) / len(drafted) if drafted else 0.0
        cost = pass_cost(traces, plain)
        plain_seconds = _seconds_per_token(plain)
        rows = [{"length": 0, "measured": 1.0, "measured_low": 1.0, "measured_high": 1.0, "closed_form": 1.0}]
        for trace in traces:
            speedup = ratio(plain_seconds, _seconds_per_token(trace))
            length = length_of(trace)
            closed = walltime_improvement(alpha, length, cost)
            rows.append({"length": length, **speedup.row("measured"), "closed_form": closed})
        worst = min(rows[1:], key=lambda row: row["measured"])
        verdict = "slower than plain decoding" if worst["measured"] < 1 else "the smallest gain"
        return Data(
            rows,
            measured_on(
                traces[0], what="Plain seconds per token / speculative seconds per token, first rounds excluded"
            )
            + f"; closed form at α = {alpha:.3f}, c = {cost:.3f}{BARS}",
            f"length {worst['length']}: {worst['measured']:.2f}, {verdict}",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        x = [row["length"] for row in data.rows]
        closed = [row["closed_form"] for row in data.rows]
        axes.plot(x, closed, color=INK["theory"], linestyle="--", label="closed form")
        band(axes, x, data.rows, "measured", label="measured")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(x)
        axes.set(xlabel="length K of the chain", ylabel="speed-up over plain decoding", ylim=(0, None))
        legend(axes)


def length_of(trace: Trace) -> int:
    """Return the planned length of a trace of the planner `fixed`."""
    name, _, length = trace.header.plan.partition(":")
    if name != "fixed" or not length.isdigit():
        raise ConfigurationError(f"a trace of plan '{trace.header.plan}' has no fixed length: record with fixed:K")
    return int(length)


def _seconds_per_token(trace: Trace) -> list[float]:
    return [seconds / tokens for seconds, tokens in zip(*per_text_seconds(trace), strict=True)]


def pass_cost(traces: Sequence[Trace], plain: Trace) -> float:
    """Return the seconds of one drafted level divided by those of a plain round."""
    levels = seconds = 0.0
    for trace in traces:
        for traced_round in trace.rounds:
            levels += max((max(depths(step.tree.parents), default=0) for step in traced_round.steps), default=0)
            seconds += traced_round.seconds["draft"]
    rounds = decode_rounds(plain)
    return (seconds / levels) / (sum(s["total"] for _, s, _ in rounds) / len(rounds)) if levels else 0.0


RATIOS = (0.0, 0.05, 0.1, 0.2)


@final
class OperationsFactor(Figure):
    """Operations of speculative decoding divided by those of plain decoding, against the length of the chain.

    Measured are the rows of the target's passes per written token, the factor for a drafter without operations.
    Source: arXiv 2211.17192, theorem 3.11.
    """

    title = "Operations per token, relative to plain decoding"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace, texts = watched(material)
        alpha = acceptance(texts).value
        rows: list[dict[str, Any]] = []
        for length in range(deepest(texts) + 1):
            runs = [replay(text, chain(length)) for text in texts]
            counted = ratio([run.nodes + run.rounds for run in runs], [run.tokens for run in runs])
            closed = {f"closed_form_{r:g}": operations_factor(alpha, length, r) for r in RATIOS}
            rows.append({"length": length, **counted.row("measured"), **closed})
        most = rows[-1]
        return Data(
            rows,
            measured_on(trace, what="Rows of target passes per written token")
            + f"; closed form at α = {alpha:.3f}{BARS}",
            f"with {most['length']} drafted tokens the target computes {most['measured']:.2f} times the operations of "
            "plain decoding: where operations and not memory limit speed, drafting loses",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        x = [row["length"] for row in data.rows]
        for place, r in enumerate(RATIOS):
            name = "closed form, drafter without operations" if r == 0 else f"closed form, drafter {r:g} of the target"
            values = [row[f"closed_form_{r:g}"] for row in data.rows]
            axes.plot(x, values, color=INK["theory"], linestyle=("--", ":", "-.", "-")[place], label=name)
        band(axes, x, data.rows, "measured", label="measured, target only")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(xlabel="length K of the chain", ylabel="operations / plain operations", ylim=(0, None))
        legend(axes)


COSTS = (0.02, 0.1, 0.3)
LONGEST = 12


@final
class OptimalLength(Figure):
    """Optimal length of a chain against acceptance, for several costs of a drafter's pass, with a point per text.

    Source: arXiv 2211.17192, section 3.5: the length with the best (1 - α^(K + 1)) / ((1 - α) (K c + 1)).
    """

    title = "Optimal length of a chain against acceptance"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace, texts = watched(material)
        limit = deepest(texts)
        rows = []
        for number, (text, (hits, places)) in enumerate(zip(texts, acceptances(texts), strict=True), 1):
            alpha = hits / places if places else 0.0
            for cost in COSTS:
                predicted = min(limit, best_length(alpha, cost))
                runs = [replay(text, chain(length)) for length in range(limit + 1)]
                speeds = [run.tokens / (run.rounds * (length * cost + 1)) for length, run in enumerate(runs)]
                best = int(np.argmax(speeds))  # the shortest among equals
                rows.append({"text": number, "acceptance": alpha, "cost": cost, "best": best, "predicted": predicted})
        worst = min(rows, key=lambda row: (row["best"], row["acceptance"]))
        equal = sum(row["best"] == row["predicted"] for row in rows) / len(rows)
        return Data(
            rows,
            measured_on(trace, what=f"Best length up to {limit} by exact replay, one point per text and cost")
            + f"; equal to the closed form (cut at {limit}) in {equal:.0%} of the cases",
            f"text {worst['text']} (α = {worst['acceptance']:.2f}) at cost {worst['cost']:g} is best with "
            f"{worst['best']} drafted tokens",
            extra=limit,
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        alphas = np.linspace(0.01, 0.97, 97)
        for cost, (colour, marker, line), shift in zip(COSTS, SERIES, (-0.12, 0.0, 0.12), strict=False):
            curve = [best_length(a, cost, longest=LONGEST) for a in alphas]
            axes.step(alphas, curve, color=colour, linestyle=line, linewidth=1.0, where="mid")
            rows = grouped(data.rows, "cost")[cost]
            style = {"color": colour, "marker": marker, "markersize": 4}
            x = [row["acceptance"] for row in rows]
            axes.plot(x, [row["best"] + shift for row in rows], linestyle="none", **style)
            axes.plot([], [], linestyle=line, label=f"c = {cost:g}", **style)
        axes.axhline(data.extra, color="black", linewidth=0.8, linestyle=":")
        axes.annotate("longest recorded chain", (0.02, data.extra + 0.15), fontsize=7)
        axes.set(xlabel="acceptance α of the first drafted token", ylabel="best length K", ylim=(-0.5, LONGEST + 0.5))
        legend(axes, title="line: closed form; points: texts, replayed", title_fontsize=7.5)


ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TABLE_COSTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
LENGTHS = (1, 2, 3, 4, 5, 6, 8)
TABLE_LONGEST = 16


@final
class WhatIf(Figure):
    """What-if table: speed-up by acceptance and cost of a drafter's pass, at the best length, and where this run is.

    Source: arXiv 2211.17192, theorem 3.8.
    """

    title = "What if: speed-up by acceptance, cost and length (closed form)"
    runs = ("watch",)
    size = (9.0, 4.4)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        alpha = acceptance(texts_of(trace)).value
        rows = [
            {"length": k, "acceptance": a, "cost": c, "speedup": walltime_improvement(a, k, c)}
            for k in LENGTHS
            for a in sorted({*ALPHAS, round(alpha, 3)})
            for c in TABLE_COSTS
        ]
        least = min(rows, key=lambda row: row["speedup"])
        return Data(
            rows,
            measured_on(trace, what="Closed form; one row has the α that was measured") + f", α = {alpha:.3f}",
            f"K = {least['length']}, α = {least['acceptance']:g}, c = {least['cost']:g} takes "
            f"{1 / least['speedup']:.1f} times the time of plain decoding",
            extra=round(alpha, 3),
        )

    def draw(self, figure: Any, data: Data) -> None:
        left, right = figure.subplots(1, 2)
        alphas = sorted({row["acceptance"] for row in data.rows})
        lengths = [[best_length(a, c, longest=TABLE_LONGEST) for c in TABLE_COSTS] for a in alphas]
        best = [
            [walltime_improvement(a, k, c) for k, c in zip(each, TABLE_COSTS, strict=True)]
            for a, each in zip(alphas, lengths, strict=True)
        ]
        labels = [
            [f"{value:.2f}\nK={k}" for value, k in zip(*row, strict=True)] for row in zip(best, lengths, strict=True)
        ]
        names = [f"{a:g}" + (" measured" if a == data.extra else "") for a in alphas]
        measured = [[walltime_improvement(data.extra, k, c) for c in TABLE_COSTS] for k in LENGTHS]
        cells = [[f"{value:.2f}" for value in row] for row in measured]
        title = f"speed-up at the best K up to {TABLE_LONGEST}, and this K"
        _speedups(left, best, labels, names, title=title, label="acceptance α")
        title = f"speed-up at the measured α = {data.extra:g}, by K"
        _speedups(right, measured, cells, [str(k) for k in LENGTHS], title=title, label="length K")


def _speedups(
    axes: Any, values: list[list[float]], labels: list[list[str]], rows: list[str], *, title: str, label: str
) -> None:
    # a logarithm, so that twice as fast and half as fast are equally far from the middle
    scale = {"cmap": "PuOr", "vmin": -3, "vmax": 3, "aspect": "auto"}
    columns = [f"{c:g}" for c in TABLE_COSTS]
    heat_map(axes, np.log2(values), labels, columns=columns, rows=rows, fontsize=6.5, **scale)
    axes.set(xlabel="cost c of a drafter's pass / target's pass", ylabel=label)
    axes.set_title(title, fontsize=8)
