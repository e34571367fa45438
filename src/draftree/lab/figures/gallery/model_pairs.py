"""Tokens per pass by pair of models, with the sizes of both vocabularies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from draftree.engine.trace import Trace
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, legend
from draftree.lab.figures.measures import ratio, spread

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
        rows = [_row(target, drafter, temperature, part) for (target, drafter, temperature), part in groups.items()]
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


def _row(target: str, drafter: str, temperature: float, part: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
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
