"""Tokens per pass by pair of models, with the sizes of both vocabularies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, final

from draftree.core.errors import ConfigurationError
from draftree.figures.base import Data, Figure
from draftree.figures.drawing import INK
from draftree.figures.intervals import ratio
from draftree.figures.material import Material

VOCABULARIES = {"smollm2-135m-instruct": 49_152, "tinyllama-1.1b-chat": 32_000, "stories15m": 32_000}
"""Tokens of the catalogue's models, from their configuration files."""


@final
class ModelPairs(Figure):
    """Tokens per pass of draft models and heads."""

    title: ClassVar[str] = "Tokens per pass by pair of models and vocabulary"
    results: ClassVar[tuple[str, ...]] = ("record",)
    size: ClassVar[tuple[float, float]] = (8.4, 5.2)

    def data(self, material: Material) -> Data:
        """Return tokens per pass of each drafter with a model of its own and a fixed plan, by target and file."""
        groups: dict[tuple[str, str, float], list[Mapping[str, Any]]] = {}
        for header, line in material.lines(kind="record"):
            method = line["method"]
            if method.startswith(("model:", "head:")) and "@fixed" in method and "temperature" in header:
                groups.setdefault((header["model"]["name"], method, header["temperature"]), []).append(line)
        if not groups:
            raise ConfigurationError("the results have no method 'model:…@fixed' or 'head:…@fixed': name other files")
        rows = [_row(target, method, temperature, part) for (target, method, temperature), part in groups.items()]
        rows.sort(key=lambda row: (row["target"], row["temperature"], -row["tokens"]))
        least = min(rows, key=lambda row: row["tokens"])
        return Data(
            rows,
            f"Tokens per pass of {len(rows)} pairs in results files, {min(r['texts'] for r in rows)} to "
            f"{max(r['texts'] for r in rows)} texts each, of different prompts; bars: 95% over texts",
            f"{least['drafter']} for {least['target']} at temperature {least['temperature']:g}: "
            f"{least['tokens']:.2f} tokens per pass",
        )

    def draw(self, figure: Any, data: Data) -> None:
        """Draw a bar per pair, coloured by whether the vocabularies are the same."""
        axes = figure.subplots()
        names = [f"{row['drafter']} → {row['target']}, T = {row['temperature']:g}\n{_sizes(row)}" for row in data.rows]
        colours = [INK["measured"] if row["same_vocabulary"] else INK["other"] for row in data.rows]
        low = [row["tokens"] - row["tokens_low"] for row in data.rows]
        high = [row["tokens_high"] - row["tokens"] for row in data.rows]
        axes.barh(range(len(names)), [row["tokens"] for row in data.rows], xerr=(low, high), color=colours, capsize=2)
        axes.set_yticks(range(len(names)), names, fontsize=6.5)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("tokens per pass (blue: the same vocabulary; violet: another one)")


def _row(target: str, method: str, temperature: float, part: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = ratio([_count(line, "tokens") for line in part], [_count(line, "rounds") for line in part])
    drafter = method.partition("@")[0]
    model = target if drafter.startswith("head:") else drafter.partition(":")[2].partition(",")[0]
    sizes = VOCABULARIES.get(target), VOCABULARIES.get(model)
    return {
        "target": target,
        "drafter": drafter,
        "temperature": temperature,
        "target_vocabulary": sizes[0],
        "drafter_vocabulary": sizes[1],
        "same_vocabulary": drafter.startswith("head:") or (target, model) in SAME or target == model,
        "texts": len({line["task"] for line in part}),
        **found.row("tokens"),
    }


SAME = {("tinyllama-1.1b-chat", "stories15m")}
"""Pairs of different models with one vocabulary."""


def _count(line: Mapping[str, Any], name: str) -> float:
    stats = line.get("stats", line)
    if name == "rounds":
        return float(stats["rounds"])
    return float(stats["rounds"] + stats["accepted_tokens"])


def _sizes(row: Mapping[str, Any]) -> str:
    return f"{row['drafter_vocabulary'] or '?'} → {row['target_vocabulary'] or '?'} tokens"
