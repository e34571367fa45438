"""Files that every training writes: results on unseen texts, recipe, model card with a data statement, plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError, import_extra
from draftree.core.files import MALFORMED, read_json
from draftree.core.svg import save_svg
from draftree.loading.provenance import machine, versions
from draftree.train.evaluate import Evaluation, table
from draftree.train.loop import LOG, RunState, read_log
from draftree.train.preparing import Prepared
from draftree.train.settings import TrainSettings

Draw = Callable[[Any, Sequence[dict[str, Any]]], None]
SIZE = (6.4, 4.0)
AVERAGED = 40
"""Points of the curves of losses: successive updates are averaged to so many."""


def draw_run(log: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write the plots of a log as SVG; return their paths.

    Args:
        folder: created if it does not exist.
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


RECIPE, CARD = "recipe.json", "README.md"


def finish(
    prepared: Prepared,
    settings: TrainSettings,
    state: RunState,
    evaluation: Evaluation,
    *,
    kind: str,
    usage: str,
    more: Mapping[str, Any],
) -> list[str]:
    """Write recipe, card and plots into the folder of the result; return lines about what could not be written.

    Args:
        kind: noun for the result, such as "EAGLE-3 head".
    """
    output = prepared.job.output
    facts = recipe(prepared, settings, state, evaluation) | dict(more)
    write(output / RECIPE, json.dumps(facts, indent=1) + "\n")
    write(output / CARD, card(facts, kind, usage))
    try:
        draw_run(read_log(prepared.job.training / LOG), prepared.job.training / "plots")
    except ConfigurationError as reason:
        return [f"no plots: {reason}"]
    return []


def recipe(prepared: Prepared, settings: TrainSettings, state: RunState, evaluation: Evaluation) -> dict[str, Any]:
    """Return everything that a repetition needs, and the results."""
    data = prepared.data.recipe
    return {
        "target": prepared.loaded.name,
        "fingerprint": prepared.loaded.model.fingerprint,
        "data": {
            "texts": {"seen": len(prepared.seen), "unseen": len(prepared.unseen)},
            "tokens": prepared.data.num_tokens,
            "temperatures": list(data.temperatures),
            "seed": data.seed,
            "unseen_share": prepared.job.unseen_share,
            "data_tokens": prepared.job.data_tokens,
            "prompts": [
                {"name": one.name, "count": one.count, "sha256": one.sha256, "licence": one.licence}
                for one in data.prompts
            ],
        },
        "settings": settings.facts(),
        "run": {
            "updates": state.step,
            "trained_predictions": state.tokens,
            "minutes": round(state.seconds / 60, 2),
            "best_update": state.best_step,
            "processes": prepared.processes.count,
            "dtype": str(prepared.dtype).removeprefix("torch."),
        },
        "unseen": evaluation.facts(),
        "machine": machine(prepared.processes.device),
        "versions": versions(),
    }


def earlier_runs(start: Path | None) -> dict[str, Any]:
    """Return the part of a recipe on the runs before, for a drafter that training starts from.

    Args:
        start: its folder; None for a new drafter.

    Returns:
        `earlier` with data, settings and size of each run, the first one first; nothing if there is no recipe.
    """
    if start is None:
        return {}
    try:
        found = read_json(start / RECIPE)
        runs = [*found.get("earlier", ()), {name: found[name] for name in ("data", "settings", "run") if name in found}]
        list(map(_earlier_run, runs))  # the model card needs their values
    except (OSError, *MALFORMED):
        return {}  # other programs write files of this name
    return {"earlier": runs}


def _earlier_run(facts: Mapping[str, Any]) -> str:
    data = facts["data"]
    run = facts["run"]
    return (
        f"\nAn earlier run: {run['trained_predictions']:,} predictions in {run['updates']:,} updates and "
        f"{run['minutes']} minutes, on {data['tokens']:,} tokens.\n"
    )


def card(facts: Mapping[str, Any], kind: str, usage: str) -> str:
    data, run = facts["data"], facts["run"]
    earlier = "".join(map(_earlier_run, facts.get("earlier", ())))
    lines = [
        f"# {kind} for {facts['target']}",
        "",
        "Trained with Draftree to draft tokens for this target, and of use with these weights of it only:",
        "",
        f"    draftree generate {facts['target']} --draft {usage} 'What is a prime number?'",
        "",
        f"Trained on {run['trained_predictions']:,} predictions in {run['updates']:,} updates and "
        f"{run['minutes']} minutes, on {data['tokens']:,} tokens of data.",
        *earlier.splitlines(),
        "",
        "## Acceptance on unseen texts",
        "",
        "Conditional acceptance by depth and survival, in drafts that decoding would make. All rates are in",
        "`recipe.json`.",
        "",
        *table(facts["unseen"]),
        "",
        "## Data",
        "",
        f"{data['texts']['seen']:,} answers of the target itself at temperatures "
        f"{', '.join(f'{one:g}' for one in data['temperatures'])}; {data['texts']['unseen']:,} answers to other "
        "prompts were kept for the table. Prompts are context only, no loss is computed on them:",
        "",
        "| prompts | number | licence |",
        "| --- | --- | --- |",
        *(f"| {one['name']} | {one['count']:,} | {one['licence']} |" for one in data["prompts"]),
        "",
        "The answers are the target's, so its licence and its biases apply to what was learned from them. The drafter "
        "changes the speed of the target and never its text.",
        "",
    ]
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Write a text file; an interruption leaves the old one."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
