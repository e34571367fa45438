"""Where the time goes: phases, rounds, batches, model sizes, pairs of models, and round trips."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, SERIES, band, grouped, legend, spread
from draftree.lab.figures.measures import (
    BARS,
    Estimate,
    decode_rounds,
    mean,
    measured_on,
    per_text_seconds,
    ratio,
    steps_by_sequence,
)
from draftree.options import NO_DRAFT

PHASES = {"draft": INK["other"], "score": INK["measured"], "verify": INK["good"], "other": INK["theory"]}
PHASE_RUNS = ("plain", "fixed", "adaptive")


@final
class Phases(Figure):
    title = "Where the time goes: milliseconds per token by phase"
    runs = PHASE_RUNS

    def data(self, material: Material) -> Data:
        traces = {run: material.one(run) for run in PHASE_RUNS}
        rows: list[dict[str, Any]] = []
        for run, trace in traces.items():
            seconds, tokens = per_text_seconds(trace)
            rounds = decode_rounds(trace)
            spent = {p: 1e3 * sum(s[p] for _, s, _ in rounds) / sum(tokens) for p in ("draft", "score", "verify")}
            total = ratio([1e3 * each for each in seconds], tokens)
            rest = total.value - sum(spent.values())
            rows.append({"run": run, "plan": trace.header.plan, **spent, "other": rest, **total.row("total")})
        plain = rows[0]["total"]
        best = min(row["total"] for row in rows[1:])
        slowest = max(rows[1:], key=lambda row: row["total"])
        return Data(
            rows,
            measured_on(traces["fixed"], what="Decode time") + "; black: 95% over texts",
            f"plan {slowest['plan']} takes {slowest['total'] / plain:.2f} times the time of plain decoding; the other "
            f"plan {best / plain:.2f} times",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        names = ["plain decoding" if row["run"] == "plain" else f"plan {row['plan']}" for row in data.rows]
        left = [0.0] * len(names)
        for phase, colour in PHASES.items():
            values = [max(0.0, row[phase]) for row in data.rows]
            axes.barh(names, values, left=left, color=colour, label=phase, edgecolor="white", linewidth=0.8)
            left = [start + value for start, value in zip(left, values, strict=True)]
        totals = [row["total"] for row in data.rows]
        axes.errorbar(totals, names, xerr=spread(data.rows, "total"), fmt="none", color="black", capsize=3)
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds per written token")
        legend(axes, ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0))


STRIP_RUNS = ("fixed", "adaptive")


@final
class RoundsStrip(Figure):
    title = "Rounds over one text: fixed and planned length"
    runs = STRIP_RUNS
    size = (8.0, 4.0)

    def data(self, material: Material) -> Data:
        traces = {run: material.one(run) for run in STRIP_RUNS}
        rows: list[dict[str, Any]] = []
        for run, trace in traces.items():
            at = 0
            for number, step in enumerate(next(iter(steps_by_sequence(trace).values()))):
                rows.append(
                    {
                        "run": run,
                        "plan": trace.header.plan,
                        "round": number,
                        "position": at,
                        "scored": len(step.scored),
                        "accepted": min(len(step.path), step.num_written),
                        "written": step.num_written,
                    }
                )
                at += step.num_written
        wasted = [row for row in rows if row["scored"] and not row["accepted"]]
        counts = {run: sum(row["run"] == run for row in rows) for run in traces}
        return Data(
            rows,
            measured_on(traces["fixed"], what="First text of the run")
            + f"; {counts['fixed']} rounds with plan {traces['fixed'].header.plan}, {counts['adaptive']} with "
            f"{traces['adaptive'].header.plan}",
            f"{len(wasted)} of {sum(counts.values())} rounds draft without any accepted token",
        )

    def draw(self, figure: Any, data: Data) -> None:
        runs = grouped(data.rows, "run").values()
        for axes, rows in zip(figure.subplots(2, 1, sharex=True, sharey=True), runs, strict=True):
            names = ("position", "written", "scored", "accepted")
            x, width, drafted, kept = ([row[name] for row in rows] for name in names)
            style = {"align": "edge", "edgecolor": "white", "linewidth": 0.6}
            axes.bar(x, drafted, width, color="#ffd8d3", hatch="//", label="drafted, rejected", **style)
            axes.bar(x, kept, width, color=INK["good"], label="accepted", **style)
            axes.set(ylabel="drafted nodes", title=f"plan {rows[0]['plan']}: {len(rows)} rounds")
        axes.set_xlabel("position in the text; the width of a bar is the number of tokens that the round wrote")
        legend(axes, ncols=2)


SHIFT = 1.025
"""Factor between the places of two lines, so that error bars do not hide one another."""


@final
class BatchWidth(Figure):
    title = "Speed against the batch and the length of the chain"
    runs = ("batch",)

    def data(self, material: Material) -> Data:
        traces = material.all("batch")
        rows = []
        for trace in traces:
            seconds, tokens = per_text_seconds(trace)
            length = 0 if trace.header.draft == NO_DRAFT else int(trace.header.plan.partition(":")[2])
            # the share of a text in the seconds of a round is one part in as many as the round has texts
            speed = ratio(tokens, seconds).row("speed")
            rows.append({"batch": int(trace.header.about["batch"]), "length": length, **speed})
        rows.sort(key=lambda row: (row["length"], row["batch"]))
        plain = {row["batch"]: row["speed"] for row in rows if row["length"] == 0}
        if not plain:
            raise ConfigurationError("the traces of the run 'batch' have none of plain decoding: record one")
        drafted = [row for row in rows if row["length"] and row["batch"] in plain]
        worst = min(drafted, key=lambda row: row["speed"] / plain[row["batch"]])
        least = worst["speed"] / plain[worst["batch"]]
        return Data(
            rows,
            measured_on(traces[-1], what="Decode tokens per second of all texts of the batch together") + BARS,
            f"length {worst['length']} at batch {worst['batch']}: {least:.2f} of the speed of plain decoding",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        lengths = grouped(data.rows, "length")
        for place, (length, rows) in enumerate(lengths.items()):
            label = "plain decoding" if length == 0 else f"K = {length}"
            x = [row["batch"] * SHIFT ** (place - (len(lengths) - 1) / 2) for row in rows]
            band(axes, x, rows, "speed", label=label, series=SERIES[place % len(SERIES)])
        axes.set_xscale("log", base=2)
        batches = sorted({row["batch"] for row in data.rows})
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set(xlabel="concurrent texts", ylabel="decode tokens per second", ylim=(0, None))
        legend(axes)


@final
class ModelSize(Figure):
    title = "Time of a pass by model size and width"
    results = ("pass",)
    size = (9.0, 4.4)

    def data(self, material: Material) -> Data:
        lines = material.lines(kind="pass")
        rows: list[dict[str, Any]] = []
        for header, line in lines:
            low, middle, high = (float(value) for value in np.quantile(line["milliseconds"], (0.25, 0.5, 0.75)))
            rows.append(
                {
                    "model": header["model"]["name"],
                    "cpu": header["machine"]["cpu"],
                    "weight_bytes": header["weight_bytes"],
                    "rows": line["rows"],
                    **Estimate(middle, low, high).row("milliseconds"),
                }
            )
        rows.sort(key=lambda row: (row["weight_bytes"], row["rows"]))
        for row in rows:
            fewest = next(other for other in rows if (other["model"], other["cpu"]) == (row["model"], row["cpu"]))
            row["relative"] = row["milliseconds"] / fewest["milliseconds"]
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
        for (name, cpu), series in zip(names, SERIES * 3, strict=False):
            rows = [row for row in data.rows if (row["model"], row["cpu"]) == (name, cpu)]
            x = [row["rows"] for row in rows]
            label = f"{name}, {rows[0]['weight_bytes'] / 1e6:.0f} MB"
            band(left, x, rows, "milliseconds", label=label, series=series, markersize=3, linewidth=None)
            style = dict(zip(("color", "marker", "linestyle"), series, strict=True))
            right.plot(x, [row["relative"] for row in rows], markersize=3, **style)
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


VOCABULARIES = {"smollm2-135m-instruct": 49_152, "tinyllama-1.1b-chat": 32_000, "stories15m": 32_000}
"""Tokens of the catalogue's models, from their configuration files."""


@final
class ModelPairs(Figure):
    title = "Tokens per pass by pair of models and vocabulary"
    runs = ("pair",)
    size = (8.4, 5.2)

    def data(self, material: Material) -> Data:
        groups: dict[tuple[str, str, float], list[tuple[str, float, float]]] = defaultdict(list)
        """Name, tokens and rounds of the texts by target, drafter and temperature."""
        for trace in material.all("pair"):
            header = trace.header
            key = (header.model, f"{header.draft},k={header.plan.partition(':')[2]}", header.about["temperature"])
            groups[key] += [
                (name, sum(step.num_written for step in steps), len(steps))
                for name, steps in steps_by_sequence(trace).items()
            ]
        for about, line in material.lines(kind="record") if material.has((), ("record",)) else ():
            drafter, _, plan = line["method"].partition("@")
            if drafter.startswith(("model:", "head:")) and plan == "fixed" and "temperature" in about:
                stats = line.get("stats", line)
                counts = (line["task"], stats["rounds"] + stats["accepted_tokens"], stats["rounds"])
                groups[about["model"]["name"], drafter, about["temperature"]].append(counts)
        rows = [
            _pair_row(target, drafter, temperature, part) for (target, drafter, temperature), part in groups.items()
        ]
        rows.sort(key=lambda row: (row["target"], row["temperature"], -row["tokens"]))
        least = min(rows, key=lambda row: row["tokens"])
        return Data(
            rows,
            f"Tokens per pass of {len(rows)} pairs, {min(r['texts'] for r in rows)} to {max(r['texts'] for r in rows)} "
            f"texts each; prompts differ between targets{BARS}",
            f"{least['drafter']} for {least['target']} at temperature {least['temperature']:g}: "
            f"{least['tokens']:.2f} tokens per pass",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        names = [
            f"{row['drafter']} → {row['target']}, T = {row['temperature']:g}\n"
            f"{row['drafter_vocabulary'] or '?'} → {row['target_vocabulary'] or '?'} tokens"
            for row in data.rows
        ]
        kinds = grouped([{**row, "place": place} for place, row in enumerate(data.rows)], "same_vocabulary")
        for is_same, style in KINDS.items():
            rows = kinds.get(is_same, [])
            x = [row["tokens"] for row in rows]
            if rows:
                xerr = spread(rows, "tokens")
                axes.barh([row["place"] for row in rows], x, xerr=xerr, edgecolor="white", capsize=2, **style)
        axes.set_yticks(range(len(names)), names, fontsize=6.5)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("tokens per pass, bonus included; 1 is plain decoding")
        legend(axes, loc="lower right")


def _pair_row(
    target: str, drafter: str, temperature: float, part: Sequence[tuple[str, float, float]]
) -> dict[str, Any]:
    model = target if drafter.startswith("head:") else drafter.partition(":")[2].partition(",")[0]
    sizes = VOCABULARIES.get(target), VOCABULARIES.get(model)
    is_same = "not recorded" if None in sizes else "no"  # a results file has the names of the models only
    if target == model or (target, model) in SAME:
        is_same = "yes"
    names, tokens, rounds = zip(*part, strict=True)
    return {
        "target": target,
        "drafter": drafter,
        "temperature": temperature,
        "target_vocabulary": sizes[0],
        "drafter_vocabulary": sizes[1],
        "same_vocabulary": is_same,
        "texts": len(set(names)),
        **ratio(tokens, rounds).row("tokens"),
    }


SAME = {("tinyllama-1.1b-chat", "stories15m")}
"""Pairs of different models with one vocabulary."""
KINDS = {
    "yes": {"label": "the same vocabulary", "color": INK["measured"], "hatch": ""},
    "no": {"label": "another vocabulary", "color": INK["other"], "hatch": "//"},
    "not recorded": {"label": "vocabulary not recorded", "color": INK["theory"], "hatch": ".."},
}
"""Style of a bar by whether the vocabularies are the same."""


ARMS = {"drafts": "drafts on the device", "streams": "streamed by the server"}
"""Arms of the measurement in words."""


@final
class Rtt(Figure):
    """Milliseconds per token against the round-trip time to the target, with and without drafts on the device.

    Beside the measured points: the straight line through the shortest and the longest round trip. It rises by one round
    trip per so many tokens; the points between show whether the time per token is linear in the round trip.
    """

    title = "Milliseconds per token against the round-trip time"
    results = ("round trip",)

    def data(self, material: Material) -> Data:
        lines = [line for _, line in material.lines(part="round trip")]
        rows: list[dict[str, Any]] = [
            {"arm": line["arm"], "rtt_ms": line["rtt_ms"], **mean(line["ms_per_token_by_prompt"]).row("ms_per_token")}
            for line in lines
        ]
        rows.sort(key=lambda row: (row["arm"], row["rtt_ms"]))
        for trips in grouped(rows, "arm").values():
            # the tokens per round trip that follow from the shortest and the longest one
            rise = trips[-1]["ms_per_token"] - trips[0]["ms_per_token"]
            per_trip = (trips[-1]["rtt_ms"] - trips[0]["rtt_ms"]) / rise if rise > 0 else math.inf
            for row in trips:
                row["tokens_per_trip"] = per_trip
        first = lines[0]
        worst = max(rows, key=lambda row: row["ms_per_token"])
        other = min((r for r in rows if r["rtt_ms"] == worst["rtt_ms"]), key=lambda row: row["ms_per_token"])
        beside = "" if other is worst else f"; {ARMS.get(other['arm'], other['arm'])} {other['ms_per_token']:.0f} ms"
        return Data(
            rows,
            f"Mean over {first['prompts']} texts of {first['tokens']} tokens: {first['model']}, drafter "
            f"{first['draft']} on the device, delay added on the way, {first['machine']['cpu']}{BARS}",
            f"{ARMS.get(worst['arm'], worst['arm'])} at {worst['rtt_ms']:g} ms: {worst['ms_per_token']:.0f} ms per "
            f"token{beside}",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        for (arm, rows), (colour, marker, _) in zip(grouped(data.rows, "arm").items(), SERIES, strict=False):
            x = [row["rtt_ms"] for row in rows]
            band(axes, x, rows, "ms_per_token", label=ARMS.get(arm, arm), series=(colour, marker, "-"))
            tokens = rows[0]["tokens_per_trip"]
            line = [rows[0]["ms_per_token"] + (rtt - x[0]) / tokens for rtt in x]
            axes.plot(x, line, linestyle="--", color=colour, alpha=0.6, label=f"one round trip per {tokens:.2f} tokens")
        axes.set(xlabel="round-trip time (ms)", ylabel="milliseconds per token", ylim=(0, None))
        legend(axes)
