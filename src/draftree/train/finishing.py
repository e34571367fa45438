"""Files that every training writes: results on unseen texts, recipe, model card with a data statement, plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError, import_extra
from draftree.core.files import MALFORMED, read_json, write_json, write_whole
from draftree.core.svg import save_svg
from draftree.loading.provenance import machine, versions
from draftree.train.batches import Batch
from draftree.train.evaluate import Evaluation, JudgedStep, table
from draftree.train.head_trainee import TextTrainee
from draftree.train.loop import LOG, RunState, TrainingRun, read_log
from draftree.train.preparing import Prepared

SIZE = (6.4, 4.0)
AVERAGED = 40  # points of the curves of losses: successive updates are averaged to so many


def draw_run(log: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write the plots of a log as SVG; return their paths."""
    updates = [line for line in log if line["kind"] == "update" and line["levels"]]
    evaluations = [line for line in log if line["kind"] == "evaluation"]
    if not updates:
        raise ConfigurationError("the log has no update: there is nothing to plot")
    matplotlib = import_extra("plots", "plots need", error=ConfigurationError)
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "draftree", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    draw_acceptance = partial(_draw_levels, "accepted", ylabel="sum of min(p, q) in training", ylim=(0, 1))
    for name, draw, lines in (
        ("loss", _draw_loss, updates),
        ("training-acceptance", draw_acceptance, updates),
        ("unseen-acceptance", _draw_unseen, evaluations),
        ("acceptance-length", _draw_length, evaluations),
    ):
        if lines:
            figure, axes = pyplot.subplots(figsize=SIZE, layout="constrained")
            draw(axes, lines)
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
            paths.append(folder / f"{name}.svg")
            save_svg(figure, paths[-1])
            pyplot.close(figure)
    return paths


def _curves(updates: Sequence[dict[str, Any]], key: str) -> list[tuple[list[float], list[float]]]:
    """Return tokens and means of a sum for each level, averaged over successive updates."""
    size = max(1, len(updates) // AVERAGED)
    curves: list[tuple[list[float], list[float]]] = [
        ([], []) for _ in max((line["levels"] for line in updates), key=len)
    ]
    for start in range(0, len(updates), size):
        part = updates[start : start + size]
        for level, (tokens, means) in enumerate(curves):
            rows = [line["levels"][level] for line in part if len(line["levels"]) > level]
            if count := sum(row["count"] for row in rows):
                tokens.append(part[-1]["tokens"])
                means.append(sum(row[key] for row in rows) / count)
    return curves


def _draw_levels(key: str, axes: Any, updates: Sequence[dict[str, Any]], **labels: Any) -> None:
    for level, (tokens, values) in enumerate(_curves(updates, key)):
        axes.plot(tokens, values, label=f"level {level + 1}")
    axes.set(xlabel="trained predictions", **labels)


def _draw_loss(axes: Any, updates: Sequence[dict[str, Any]]) -> None:
    _draw_levels("loss", axes, updates, ylabel="loss")
    for before, line in pairwise(updates):
        if line["loss_name"] != before["loss_name"]:
            axes.axvline(line["tokens"], color="black", linewidth=0.8, linestyle=":")
            axes.annotate(f" {line['loss_name']}", (line["tokens"], axes.get_ylim()[1]), va="top")


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


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Result of a training; without an evaluation in all processes but the first."""

    folder: Path
    evaluation: Evaluation = field(default_factory=Evaluation)
    notes: tuple[str, ...] = ()


def train(
    prepared: Prepared,
    trainee: TextTrainee,
    write: Callable[[], dict[str, Any]],
    *,
    kind: str,
    usage: str,
    watch: Callable[[Batch, list[JudgedStep]], None] | None = None,
) -> TrainingResult:
    """Train until a limit, from the checkpoint of a run that the job resumes; evaluate and write the result.

    `write`: writes the drafter after its evaluation, and returns its part of the recipe. `kind`: noun for the result,
    such as "EAGLE-3 head". `usage`: spec of the drafter. `watch`: called with the judged steps of the last evaluation.
    """
    job = prepared.job
    output = prepared.job.output
    note = prepared.note
    if prepared.processes.count == 1:
        trainee.keep_rows(prepared.data)
    run = TrainingRun(trainee, prepared.settings, job.training, prepared.processes, report=prepared.report)
    if job.resume:
        run.resume()
        note(f"resumed after {run.state.step} updates")
    note(f"{run.num_weights:,} trained weights, {len(trainee.lengths):,} texts, {str(prepared.dtype)[6:]}")
    state = run.run()
    if prepared.processes.index:
        return TrainingResult(output)
    evaluation = trainee.evaluate(None, watch=watch)
    written_facts = write()
    facts = recipe(prepared, state, evaluation) | written_facts
    write_json(output / RECIPE, facts, indent=1)
    write_whole(output / CARD, card(facts, kind, usage).encode())
    notes = []
    try:
        draw_run(read_log(job.training / LOG), job.training / "plots")
    except ConfigurationError as reason:
        notes.append(f"no plots: {reason}")
    return TrainingResult(output, evaluation, tuple(notes))


def recipe(prepared: Prepared, state: RunState, evaluation: Evaluation) -> dict[str, Any]:
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
            "prompts": [asdict(source) for source in data.prompts],
        },
        "settings": asdict(prepared.settings),
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
    """Return the part of a recipe on the runs of the drafter that training starts from, the first one first.

    `start`: its folder, which may have no recipe; None for a new drafter.
    """
    if start is None:
        return {}
    try:
        facts = read_json(start / RECIPE)
        runs = [*facts.get("earlier", ()), {name: facts[name] for name in ("data", "settings", "run") if name in facts}]
        list(map(_earlier_run, runs))  # the model card needs their values
    except (OSError, *MALFORMED):
        return {}  # other programs write files of this name
    return {"earlier": runs}


def _earlier_run(facts: Mapping[str, Any]) -> str:
    data, run = facts["data"], facts["run"]
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
        f"{', '.join(f'{temperature:g}' for temperature in data['temperatures'])}; "
        f"{data['texts']['unseen']:,} answers to other prompts were kept for the table. Prompts are context only, no "
        "loss is computed on them:",
        "",
        "| prompts | number | licence |",
        "| --- | --- | --- |",
        *(
            f"| {prompt_set['name']} | {prompt_set['count']:,} | {prompt_set['licence']} |"
            for prompt_set in data["prompts"]
        ),
        "",
        "The answers are the target's, so its licence and its biases apply to what was learned from them. The drafter "
        "changes the speed of the target and never its text.",
        "",
    ]
    return "\n".join(lines)
