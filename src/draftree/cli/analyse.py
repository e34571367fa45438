"""`draftree analyse`: figures of a model and a drafter, measured beside their theory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftree.cli.bench import PROMPTS, Category, Limit, MaxTokens, Prompts, Seed
from draftree.cli.layout import OUTPUT, argument, option
from draftree.cli.options import EXECUTION_OPTIONS, Setup, complete_draft, complete_model, takes_setup
from draftree.cli.render import note
from draftree.core.errors import ConfigurationError, require_extra
from draftree.options import SPECULATION

if TYPE_CHECKING:
    from draftree.engine.trace import Trace
    from draftree.lab.figures.runs import RecordingOptions, RunSpec


@takes_setup(*EXECUTION_OPTIONS, generation_config="none")
def analyse(
    model: Annotated[
        str | None,
        argument(
            "A model as for 'draftree generate'; not needed for figures of --trace and --results alone.",
            "MODEL",
            complete=complete_model,
        ),
    ] = None,
    *,
    draft: Annotated[
        str | None, option("The drafter; needed with a model.", "SPEC", SPECULATION, complete=complete_draft)
    ] = None,
    tree: Annotated[
        str,
        option(
            "Shape of the wide tree that is recorded at every position, for drafters with shapes.", "SHAPE", SPECULATION
        ),
    ] = "8-2-2-1-1",
    merge: Annotated[
        list[str] | None,
        option(
            "A drafter that is merged with --draft for the figures of merged trees; repeatable. If not given: suffix, "
            "ngram, lookahead and model:stories15m.",
            "SPEC",
            SPECULATION,
        ),
    ] = None,
    prompts: Prompts = None,
    category: Category = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 48,
    temperature: Annotated[float, option("0 takes the most likely token.", "X", PROMPTS)] = 0.0,
    seed: Seed = 0,
    setup: Setup,
    trace: Annotated[
        list[Path] | None, option("A trace of --record; repeatable.", "FILE", "Recorded data", names="--trace")
    ] = None,
    results: Annotated[
        list[Path] | None, option("A results file; repeatable.", "FILE", "Recorded data", names="--results")
    ] = None,
    figures: Annotated[
        str | None,
        option("Names of figures, separated by commas; all that there are data for if not given.", "NAME,...", OUTPUT),
    ] = None,
    listing: Annotated[bool, option("List all figures and end.", panel=OUTPUT, names="--list")] = False,
    output: Annotated[Path | None, option("Folder of the figures, and of the recorded traces.", "DIR", OUTPUT)] = None,
) -> None:
    """Draw the figures of speculative decoding from runs of a model, from traces and from results files.

    Every figure is written as SVG, PNG and PDF, with its numbers as CSV. Runs are recorded below DIR/traces.
    """
    if listing:
        list_figures()
        return
    folder = checked(model, draft, output, has_data=bool(trace or results))
    require_extra("plots", "'draftree analyse' needs", error=ConfigurationError)
    from draftree.lab.figures.drawing import draw_all, material_of, needed_runs, with_traces
    from draftree.lab.figures.gallery import chosen_figures

    wanted = chosen_figures([name.strip() for name in figures.split(",")] if figures else ())
    material = material_of(trace or (), results or ())
    refused: dict[str, str] = {}
    if model is not None and draft is not None:
        from draftree.lab.figures.runs import MERGED, RecordingOptions, specs_of

        merged = MERGED if merge is None else tuple(merge)
        asked = RecordingOptions(model, draft, tree, merged, temperature, seed, max_tokens)
        specs, refused = specs_of(needed_runs(wanted, material), asked)
        for run, reason in refused.items():
            note(f"run '{run}' is left out: {reason}")
        workload = (prompts, tuple(category or ()), limit)
        material = with_traces(material, record_all(asked, specs, setup, workload, folder))
    drawn = draw_all(wanted, material, folder, must=figures is not None, refused=refused, on_drawn=typer.echo)
    for name, reason in drawn.skipped.items():
        note(f"not drawn: {name}: {reason}")
    if not drawn.paths:
        raise ConfigurationError("no figure was drawn: the messages above name the data that each needs")


def checked(model: str | None, draft: str | None, output: Path | None, *, has_data: bool) -> Path:
    if output is None:
        raise typer.BadParameter("name a folder for the figures", param_hint="--output")
    if model is not None and draft is None:
        raise typer.BadParameter("a model needs a drafter: add --draft", param_hint="--draft")
    if model is None and draft is not None:
        raise typer.BadParameter("a drafter needs a model: name one, or leave --draft out", param_hint="MODEL")
    if model is None and not has_data:
        raise typer.BadParameter("there is nothing to draw: name a model, --trace or --results", param_hint="MODEL")
    return output


def list_figures() -> None:
    from draftree.lab.figures.gallery import chosen_figures

    for name, figure in chosen_figures().items():
        needs = [f"run {run}" for run in figure.runs] + [f"results '{kind}'" for kind in figure.results]
        typer.echo(f"{name:<24}{figure.title} ({', '.join(needs)})")


def record_all(
    asked: RecordingOptions,
    specs: list[RunSpec],
    setup: Setup,
    prompts: tuple[Path | None, tuple[str, ...], int | None],
    output: Path,
) -> list[Trace]:
    if not specs:
        return []
    from draftree.cli.runs import fetch_and_load, run_facts
    from draftree.lab.bench.workload import SHIPPED, encode, read_workload
    from draftree.lab.figures.runs import Recorder
    from draftree.loading.loaded import tokenizer_of

    file, categories, limit = prompts
    workload = read_workload(file or SHIPPED).choose(categories, limit)
    setup = replace(setup, model=asked.model, draft=asked.draft)
    loaded = fetch_and_load(setup)
    tokenizer = tokenizer_of(loaded, None, trust_remote_code=loaded.runs_code)
    if tokenizer is None:
        raise ConfigurationError(f"'{asked.model}' has no tokenizer: prompts cannot be encoded")
    every = [encode(task, tokenizer)[0] for task in workload.tasks]
    ids = [one for one in every if len(one) + asked.max_tokens <= loaded.model.max_length]
    if not ids:
        raise ConfigurationError(
            f"no prompt fits with {asked.max_tokens} tokens into the context of {loaded.model.max_length}: lower "
            "--max-tokens, or give shorter --prompts"
        )
    if len(ids) < len(every):
        note(f"{len(every) - len(ids)} of {len(every)} prompts do not fit into the model's context and are left out")
    about = run_facts(loaded) | {"prompts": workload.name}
    recorder = Recorder(asked, loaded, ids, output / "traces", about, tokenizer)
    found = []
    for number, spec in enumerate(specs, 1):
        note(f"run {number} of {len(specs)}: {spec.run}, {spec.draft}, {spec.verify}")
        found.append(recorder.record(spec))
    return found
