"""`draftree analyse`: figures of a model and a drafter, measured beside their theory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftree.cli.bench import PROMPTS, PromptOptions
from draftree.cli.layout import OUTPUT, argument, option, refuse
from draftree.cli.options import EXECUTION_OPTIONS, Setup, complete_draft, complete_model, takes, takes_setup, values_of
from draftree.cli.render import note
from draftree.core.errors import ConfigurationError, require_extra
from draftree.options import SPECULATION

if TYPE_CHECKING:
    from draftree.engine.trace import Trace
    from draftree.lab.figures.runs import RecordingOptions, RunSpec


@takes_setup(
    *EXECUTION_OPTIONS,
    generation_config="none",
    model=argument(
        None,
        "A model as for 'draftree generate'; not needed for figures of --trace and --results alone.",
        "MODEL",
        complete=complete_model,
    ),
    draft=option(None, "The drafter; needed with a model.", "SPEC", SPECULATION, complete=complete_draft),
)
@takes("chosen", values_of(PromptOptions), max_tokens=48)
def analyse(
    *,
    setup: Setup,
    tree: str = option(
        "8-2-2-1-1",
        "Shape of the wide tree that is recorded at every position, for drafters with shapes.",
        "SHAPE",
        SPECULATION,
    ),
    merge: list[str] | None = option(
        None,
        "A drafter that is merged with --draft for the figures of merged trees; repeatable. If not given: suffix, "
        "ngram, lookahead and model:stories15m.",
        "SPEC",
        SPECULATION,
    ),
    chosen: dict[str, Any],
    temperature: float = option(0.0, "0 takes the most likely token.", "X", PROMPTS),
    trace: list[Path] | None = option(
        None, "A trace of --record; repeatable.", "FILE", "Recorded data", names="--trace"
    ),
    results: list[Path] | None = option(
        None, "A results file; repeatable.", "FILE", "Recorded data", names="--results"
    ),
    figures: str | None = option(
        None, "Names of figures, separated by commas; all that there are data for if not given.", "NAME,...", OUTPUT
    ),
    listing: bool = option(False, "List all figures and end.", panel=OUTPUT, names="--list"),
    output: Path | None = option(None, "Folder of the figures, and of the recorded traces.", "DIR", OUTPUT),
) -> None:
    """Draw the figures of speculative decoding from runs of a model, from traces and from results files.

    Every figure is written as SVG, PNG and PDF, with its numbers as CSV. Runs are recorded below DIR/traces.
    """
    if listing:
        list_figures()
        return
    if output is None:
        raise typer.BadParameter("name a folder for the figures", param_hint="--output")
    model = setup.model
    draft = setup.draft
    if model is not None:
        refuse(draft is None, "--draft", "a model needs a drafter: add --draft")
    else:
        refuse(draft is not None, "MODEL", "a drafter needs a model: name one, or omit --draft")
        refuse(not trace and not results, "MODEL", "there is nothing to draw: name a model, --trace or --results")
    require_extra("plots", "'draftree analyse' needs", error=ConfigurationError)
    from draftree.lab.figures.drawing import draw_all, material_of, needed_runs, with_traces
    from draftree.lab.figures.gallery import chosen_figures

    wanted = chosen_figures([name.strip() for name in figures.split(",")] if figures else ())
    material = material_of(trace or (), results or ())
    refused: dict[str, str] = {}
    if model is not None:
        from draftree.lab.figures.runs import MERGED, RecordingOptions, specs_of

        merged = MERGED if merge is None else tuple(merge)
        recording = RecordingOptions(model, str(draft), tree, merged, temperature, chosen["seed"], chosen["max_tokens"])
        specs, refused = specs_of(needed_runs(wanted, material), recording)
        for run, reason in refused.items():
            note(f"run '{run}' is left out: {reason}")
        workload = (chosen["prompts"], chosen["categories"], chosen["limit"])
        material = with_traces(material, record_all(recording, specs, setup, workload, output))
    drawn = draw_all(wanted, material, output, must=figures is not None, refused=refused, on_drawn=typer.echo)
    for name, reason in drawn.skipped.items():
        note(f"not drawn: {name}: {reason}")
    if not drawn.paths:
        raise ConfigurationError("no figure was drawn: the messages above name the data that each needs")


def list_figures() -> None:
    from draftree.lab.figures.gallery import chosen_figures

    for name, figure in chosen_figures().items():
        needs = [f"run {run}" for run in figure.runs] + [f"results '{kind}'" for kind in figure.results]
        typer.echo(f"{name:<24}{figure.title} ({', '.join(needs)})")


def record_all(
    recording: RecordingOptions,
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
    loaded = fetch_and_load(setup)
    tokenizer = tokenizer_of(loaded, None, trust_remote_code=loaded.runs_code)
    if tokenizer is None:
        raise ConfigurationError(f"'{recording.model}' has no tokenizer: prompts cannot be encoded")
    encoded = [encode(task, tokenizer)[0] for task in workload.tasks]
    fitting = [ids for ids in encoded if len(ids) + recording.max_tokens <= loaded.model.max_length]
    if not fitting:
        raise ConfigurationError(
            f"no prompt fits with {recording.max_tokens} tokens into the context of {loaded.model.max_length}: lower "
            "--max-tokens, or give shorter --prompts"
        )
    if omitted := len(encoded) - len(fitting):
        note(f"{omitted} of {len(encoded)} prompts do not fit into the model's context and are left out")
    about = run_facts(loaded) | {"prompts": workload.name}
    recorder = Recorder(recording, loaded, fitting, output / "traces", about, tokenizer)
    traces = []
    for number, spec in enumerate(specs, 1):
        note(f"run {number} of {len(specs)}: {spec.run}, {spec.draft}, {spec.verify}")
        traces.append(recorder.record(spec))
    return traces
