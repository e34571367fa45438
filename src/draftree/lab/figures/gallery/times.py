"""Where the time goes: phases, rounds, batches, model sizes, pairs of models, and round trips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.engine.trace import Step, Trace
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, SERIES, band, legend
from draftree.lab.figures.measures import decode_rounds, estimates, mean, measured_on, per_text_seconds, ratio, spread

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
            rounds = decode_rounds(trace)
            names = list(dict.fromkeys(name for name, _, _ in rounds))
            tokens = [sum(n for other, _, n in rounds if other == name) for name in names]
            totals = [1e3 * sum(s["total"] for other, s, _ in rounds if other == name) for name in names]
            spent = {p: 1e3 * sum(s[p] for _, s, _ in rounds) / sum(tokens) for p in ("draft", "score", "verify")}
            total = ratio(totals, tokens)
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
        axes.errorbar(
            [row["total"] for row in data.rows],
            names,
            xerr=spread(data.rows, "total"),
            fmt="none",
            color="black",
            capsize=3,
        )
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds per written token")
        axes.legend(fontsize=7.5, ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0))


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
            for number, step in enumerate(_steps(trace)):
                scored = len(step.scored)
                accepted = min(len(step.path), step.num_written)
                plan = trace.header.plan
                rows.append(
                    {"run": run, "plan": plan, "round": number, "position": at, "scored": scored, "accepted": accepted,
                     "written": step.num_written}
                )  # fmt: skip
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
        for axes, run in zip(figure.subplots(2, 1, sharex=True, sharey=True), STRIP_RUNS, strict=True):
            rows = [row for row in data.rows if row["run"] == run]
            x = [row["position"] for row in rows]
            width = [row["written"] for row in rows]
            drafted = [row["scored"] for row in rows]
            kept = [row["accepted"] for row in rows]
            given = {"align": "edge", "edgecolor": "white", "linewidth": 0.6}
            axes.bar(x, drafted, width, color="#ffd8d3", hatch="//", label="drafted, rejected", **given)
            axes.bar(x, kept, width, color=INK["good"], label="accepted", **given)
            axes.set(ylabel="drafted nodes", title=f"plan {rows[0]['plan']}: {len(rows)} rounds")
        axes.set_xlabel("position in the text; the width of a bar is the number of tokens that the round wrote")
        axes.legend(fontsize=7.5, ncols=2)


def _steps(trace: Trace) -> list[Step]:
    """Return the rounds of the first sequence."""
    first = trace.rounds[0].steps[0].sequence
    return [step for one in trace.rounds for step in one.steps if step.sequence == first]


SHIFT = 1.025
"""Factor between the places of two lines, so that error bars do not hide one another."""


@final
class BatchWidth(Figure):
    title = "Speed against the batch and the length of the chain"
    runs = ("batch",)

    def data(self, material: Material) -> Data:
        traces = material.all("batch")
        rows = sorted((_batch_row(trace) for trace in traces), key=lambda row: (row["length"], row["batch"]))
        plain = {row["batch"]: row["speed"] for row in rows if row["length"] == 0}
        if not plain:
            raise ConfigurationError("the traces of the run 'batch' have none of plain decoding: record one")
        drafted = [row for row in rows if row["length"] and row["batch"] in plain]
        worst = min(drafted, key=lambda row: row["speed"] / plain[row["batch"]])
        least = worst["speed"] / plain[worst["batch"]]
        return Data(
            rows,
            measured_on(traces[-1], what="Decode tokens per second of all texts of the batch together")
            + "; bars: 95% over texts",
            f"length {worst['length']} at batch {worst['batch']}: {least:.2f} of the speed of plain decoding",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        lengths = sorted({row["length"] for row in data.rows})
        for place, length in enumerate(lengths):
            colour, marker, line = SERIES[place % len(SERIES)]
            rows = [row for row in data.rows if row["length"] == length]
            label = "plain decoding" if length == 0 else f"K = {length}"
            x = [row["batch"] * SHIFT ** (place - (len(lengths) - 1) / 2) for row in rows]
            band(axes, x, estimates(rows, "speed"), label=label, colour=colour, marker=marker, line=line)
        axes.set_xscale("log", base=2)
        batches = sorted({row["batch"] for row in data.rows})
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set(xlabel="concurrent texts", ylabel="decode tokens per second", ylim=(0, None))
        legend(axes)


def _batch_row(trace: Trace) -> dict[str, Any]:
    spent, written = per_text_seconds(trace)
    batch = int(trace.header.about["batch"])
    length = 0 if trace.header.draft == "none" else int(trace.header.plan.partition(":")[2])
    # the share of a text in the seconds of a round is one part in as many as the round has texts
    return {"batch": batch, "length": length, **ratio(written, spent).row("speed")}


@final
class ModelSize(Figure):
    title = "Time of a pass by model size and width"
    results = ("pass",)
    size = (9.0, 4.4)

    def data(self, material: Material) -> Data:
        lines = material.lines(kind="pass")
        rows = [_pass_row(header, line) for header, line in lines]
        rows.sort(key=lambda row: (row["weight_bytes"], row["rows"]))
        relative(rows)
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
        for (name, cpu), (colour, marker, line) in zip(names, SERIES * 3, strict=False):
            rows = [row for row in data.rows if (row["model"], row["cpu"]) == (name, cpu)]
            x = [row["rows"] for row in rows]
            values = [row["milliseconds"] for row in rows]
            label = f"{name}, {rows[0]['weight_bytes'] / 1e6:.0f} MB"
            left.errorbar(
                x,
                values,
                yerr=spread(rows, "milliseconds"),
                marker=marker,
                linestyle=line,
                markersize=3,
                color=colour,
                label=label,
                capsize=2,
            )
            right.plot(x, [row["relative"] for row in rows], marker=marker, linestyle=line, markersize=3, color=colour)
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


def _pass_row(header: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
    low, middle, high = np.quantile(line["milliseconds"], (0.25, 0.5, 0.75))
    return {
        "model": header["model"]["name"],
        "cpu": header["machine"]["cpu"],
        "weight_bytes": header["weight_bytes"],
        "rows": line["rows"],
        "milliseconds": float(middle),
        "milliseconds_low": float(low),
        "milliseconds_high": float(high),
        "relative": 0.0,
    }


def relative(rows: Sequence[dict[str, Any]]) -> None:
    """Fill in the time relative to the pass with the fewest rows of the same model and processor."""
    for row in rows:
        same = [other for other in rows if (other["model"], other["cpu"]) == (row["model"], row["cpu"])]
        row["relative"] = row["milliseconds"] / min(same, key=lambda other: other["rows"])["milliseconds"]


VOCABULARIES = {"smollm2-135m-instruct": 49_152, "tinyllama-1.1b-chat": 32_000, "stories15m": 32_000}
"""Tokens of the catalogue's models, from their configuration files."""


@final
class ModelPairs(Figure):
    title = "Tokens per pass by pair of models and vocabulary"
    runs = ("pair",)
    size = (8.4, 5.2)

    def data(self, material: Material) -> Data:
        groups: dict[tuple[str, str, float], list[tuple[str, float, float]]] = {}
        for trace in material.all("pair"):
            header = trace.header
            key = (header.model, f"{header.draft},k={header.plan.partition(':')[2]}", header.about["temperature"])
            groups.setdefault(key, []).extend(_of_trace(trace))
        for key, counts in _of_results(material):
            groups.setdefault(key, []).append(counts)
        rows = [
            _pair_row(target, drafter, temperature, part) for (target, drafter, temperature), part in groups.items()
        ]
        rows.sort(key=lambda row: (row["target"], row["temperature"], -row["tokens"]))
        least = min(rows, key=lambda row: row["tokens"])
        return Data(
            rows,
            f"Tokens per pass of {len(rows)} pairs, {min(r['texts'] for r in rows)} to {max(r['texts'] for r in rows)} "
            "texts each; prompts differ between targets; bars: 95% over texts",
            f"{least['drafter']} for {least['target']} at temperature {least['temperature']:g}: "
            f"{least['tokens']:.2f} tokens per pass",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        names = [f"{row['drafter']} → {row['target']}, T = {row['temperature']:g}\n{_sizes(row)}" for row in data.rows]
        for is_same, (label, colour, hatch) in KINDS.items():
            places = [place for place, row in enumerate(data.rows) if row["same_vocabulary"] == is_same]
            if not places:
                continue
            rows = [data.rows[place] for place in places]
            axes.barh(
                places, [row["tokens"] for row in rows], xerr=spread(rows, "tokens"), color=colour, hatch=hatch,
                edgecolor="white", capsize=2, label=label,
            )  # fmt: skip
        axes.set_yticks(range(len(names)), names, fontsize=6.5)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("tokens per pass, bonus included; 1 is plain decoding")
        legend(axes, loc="lower right")


def _of_trace(trace: Trace) -> list[tuple[str, float, float]]:
    """Return name, tokens and rounds of every text."""
    found: dict[str, list[float]] = {}
    for one in trace.rounds:
        for step in one.steps:
            counts = found.setdefault(step.sequence, [0.0, 0.0])
            counts[0], counts[1] = counts[0] + step.num_written, counts[1] + 1
    return [(name, tokens, rounds) for name, (tokens, rounds) in found.items()]


def _of_results(material: Material) -> Iterator[tuple[tuple[str, str, float], tuple[str, float, float]]]:
    """Yield the texts of methods with a model and a fixed plan."""
    if not material.has((), ("record",)):
        return
    for header, line in material.lines(kind="record"):
        drafter, _, plan = line["method"].partition("@")
        if drafter.startswith(("model:", "head:")) and plan == "fixed" and "temperature" in header:
            stats = line.get("stats", line)
            counts = (line["task"], float(stats["rounds"] + stats["accepted_tokens"]), float(stats["rounds"]))
            yield (header["model"]["name"], drafter, header["temperature"]), counts


def _pair_row(
    target: str, drafter: str, temperature: float, part: Sequence[tuple[str, float, float]]
) -> dict[str, Any]:
    found = ratio([tokens for _, tokens, _ in part], [rounds for _, _, rounds in part])
    model = target if drafter.startswith("head:") else drafter.partition(":")[2].partition(",")[0]
    sizes = VOCABULARIES.get(target), VOCABULARIES.get(model)
    return {
        "target": target,
        "drafter": drafter,
        "temperature": temperature,
        "target_vocabulary": sizes[0],
        "drafter_vocabulary": sizes[1],
        "same_vocabulary": _is_same(target, model, sizes),
        "texts": len({name for name, _, _ in part}),
        **found.row("tokens"),
    }


def _is_same(target: str, model: str, sizes: tuple[int | None, int | None]) -> str:
    """Return "yes", "no", or "not recorded": a results file has the names of the models only."""
    if target == model or (target, model) in SAME:
        return "yes"
    return "no" if None not in sizes else "not recorded"


SAME = {("tinyllama-1.1b-chat", "stories15m")}
"""Pairs of different models with one vocabulary."""
KINDS = {
    "yes": ("the same vocabulary", INK["measured"], ""),
    "no": ("another vocabulary", INK["other"], "//"),
    "not recorded": ("vocabulary not recorded", INK["theory"], ".."),
}
"""Label, colour and hatch of a bar by whether the vocabularies are the same."""


def _sizes(row: Mapping[str, Any]) -> str:
    return f"{row['drafter_vocabulary'] or '?'} → {row['target_vocabulary'] or '?'} tokens"


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
