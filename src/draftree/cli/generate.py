"""`draftree generate`: generation for one prompt or a file of prompts, with n texts each."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftree.cli.flags import sampling_of
from draftree.cli.layout import option
from draftree.cli.options import (
    ALL_OPTIONS,
    OUTPUT,
    PARALLEL_OPTIONS,
    TEXT,
    AsJson,
    Chat,
    Model,
    Prompt,
    Setup,
    System,
    When,
    decoder_of,
    import_engine,
    require_new,
    takes,
    takes_setup,
)
from draftree.cli.prompt import FilePrompt, Request, Task, read_prompt, read_prompts
from draftree.cli.render import Colour, Style, is_terminal, note, say
from draftree.loading.resolve import require_sound
from draftree.parallel.entry import leave_to_rank_zero
from draftree.sampling.params import SamplingParams

if TYPE_CHECKING:
    from draftree.cli.runs import Screen, Setup
    from draftree.options import DecoderOptions

__all__ = ["generate"]

Stream = Annotated[
    bool | None,
    option(
        "Show the text while it is generated; default: only on a terminal.", panel=OUTPUT, names="--stream/--no-stream"
    ),
]
Compare = Annotated[
    bool,
    option(
        "Also decode plainly with the same seed; exit status 1 if the texts differ.", panel=OUTPUT, names="--compare"
    ),
]
Record = Annotated[
    Path | None, option("A trace of all rounds, for 'draftree trace' and 'draftree analyse'.", "FILE", OUTPUT)
]
Prompts = Annotated[
    str | None,
    option(
        "File of prompts that run concurrently: one per line, or JSON lines with 'prompt' or 'messages', and "
        "optionally 'id'; '-' is standard input. With --json one object per line.",
        "FILE",
        TEXT,
    ),
]


def require_alone(prompt: str | None, *, stream: bool | None, compare: bool) -> None:
    """Refuse options for a single prompt in combination with a file of prompts."""
    if prompt is not None:
        raise typer.BadParameter("both a prompt and --prompts were given: leave one of them out", param_hint="PROMPT")
    given = {"--stream": bool(stream), "--compare": compare}
    about_one = next((flag for flag, is_given in given.items() if is_given), None)
    if about_one is not None:
        raise typer.BadParameter(
            f"it applies to one prompt, and --prompts gives several: leave {about_one} out", param_hint=about_one
        )


@takes("params", sampling_of())
@takes_setup(*ALL_OPTIONS, *PARALLEL_OPTIONS)
@takes("decoder", decoder_of)
def generate(
    context: typer.Context,
    model: Model,
    prompt: Prompt = None,
    *,
    prompts: Prompts = None,
    setup: Setup,
    decoder: DecoderOptions,
    chat: Chat = None,
    system: System = None,
    stream: Stream = None,
    colour: When = Colour.AUTO,
    as_json: AsJson = False,
    compare: Compare = False,
    record: Record = None,
    params: SamplingParams,
) -> None:
    """Generate text. The text goes to standard output, everything else to standard error."""
    setup = dataclasses.replace(setup, model=model)
    leave_to_rank_zero(setup)
    check_output(params, as_json=as_json, stream=stream, colour=colour)
    if chat is False and system is not None:
        raise typer.BadParameter("--no-chat has no system message: leave one of them out", param_hint="--system")
    if chat is False and setup.allow_control_tokens:
        raise typer.BadParameter(
            "with --no-chat control tokens are always encoded as such: leave one of them out",
            param_hint="--allow-control-tokens",
        )
    require_new(record)
    if prompts is not None:
        require_alone(prompt, stream=stream, compare=compare)
    batch = None if prompts is None else read_prompts(prompts)
    task = Task(read_prompt(prompt) if batch is None else "", system, chat, decoder)
    require_sound(model)
    import_engine()
    from draftree.cli.runs import Screen

    check_material(setup, params)
    check_beside(setup, compare=compare, record=record)
    live = params.n == 1 and (is_terminal(sys.stdout) if stream is None else stream)
    screen = None if as_json else Screen(Style.chosen(colour, sys.stdout), live=live)
    notes = Style.chosen(colour, sys.stderr)
    source = context.get_parameter_source("max_tokens")
    request = Request(task, params, fits_context=source is not None and source.name == "DEFAULT")
    if batch is not None:
        write_batch_and_report(setup, batch, request, screen=screen, notes=notes, record=record)
    elif compare:
        compare_and_report(setup, request, screen, notes)
    else:
        write_and_report(setup, request, screen, notes=notes, record=record)


def check_output(params: SamplingParams, *, as_json: bool, stream: bool | None, colour: Colour) -> None:
    """Check that the output options fit together and to the parameters."""
    if as_json and stream:
        raise typer.BadParameter("--json prints one object at the end: leave --stream out", param_hint="--stream")
    if as_json and colour is Colour.ALWAYS:
        raise typer.BadParameter(
            "--json prints one object without colours: leave one of them out", param_hint="--colour"
        )
    if stream and params.n > 1:
        raise typer.BadParameter(f"--n {params.n} texts cannot be shown as one: leave --stream out", param_hint="--n")
    for name, count in (("--logprobs", params.logprobs), ("--prompt-logprobs", params.prompt_logprobs)):
        if count is not None and not as_json:
            raise typer.BadParameter("log-probabilities are shown in the object of --json: add it", param_hint=name)


def check_beside(setup: Setup, *, compare: bool, record: Path | None) -> None:
    """Check that comparisons and traces have a drafter and a single run."""
    if record is not None and compare:
        raise typer.BadParameter("a trace records one run: leave --compare out", param_hint="--record")
    if record is not None and setup.is_plain:
        raise typer.BadParameter("without a drafter there is nothing to record: add --draft", param_hint="--record")
    if compare and setup.is_plain:
        raise typer.BadParameter(
            "there is nothing to compare with: name a drafter with --draft", param_hint="--compare"
        )


def check_material(setup: Setup, params: SamplingParams) -> None:
    """Check that a prediction and a drafter that uses it occur together, and likewise for grammars."""
    methods = setup.methods()
    if params.prediction is not None and not methods.traits.reads_predictions:
        raise typer.BadParameter(
            "no drafter uses the prediction: add '--draft prediction', or merge it with another, "
            "'--draft prediction+suffix'",
            param_hint="--prediction",
        )
    if params.prediction is None and methods.traits.reads_predictions:
        raise typer.BadParameter(
            "drafter 'prediction' has nothing to draft from: give a file with --prediction", param_hint="--draft"
        )
    if methods.traits.reads_grammars and params.constraint is None:
        raise typer.BadParameter(
            "drafter 'grammar' has nothing to draft from: give --json-schema, --regex or --grammar",
            param_hint="--draft",
        )


def write_and_report(
    setup: Setup, request: Request, screen: Screen | None, *, notes: Style, record: Path | None
) -> None:
    from draftree.cli.runs import announce_methods, dump, fetch_and_load, recorded, report, save_learned, write

    loaded = fetch_and_load(setup)
    setup = setup.decided(loaded)
    check_beside(setup, compare=False, record=record)
    with recorded(record, setup, loaded, request.params) as llm:
        announce_methods(setup, llm, request.params, notes)
        announce(setup, screen, notes)
        request = request.met(llm)
        run = write(llm, setup, request.task, params=request.params, screen=screen)
        save_learned(llm)
    if screen is None:
        say(dump(report(run, llm.model)) + "\n")
    else:
        say_choice(setup, notes)
        note(notes.dim(run.summary))
        if llm.model.note:
            note(notes.dim(llm.model.note))


def write_batch_and_report(
    setup: Setup,
    prompts: list[FilePrompt],
    request: Request,
    *,
    screen: Screen | None,
    notes: Style,
    record: Path | None,
) -> None:
    from draftree.cli.batch import write_prompts

    write_prompts(setup, prompts, request, screen=screen, notes=notes, record=record)


def compare_and_report(setup: Setup, request: Request, screen: Screen | None, notes: Style) -> None:
    from draftree.cli.runs import (
        announce_methods,
        are_equal,
        comparable,
        dump,
        fetch_and_load,
        report,
        save_learned,
        speedup,
        verdict,
        warm_up,
        write,
    )

    setup.methods()
    request = dataclasses.replace(request, params=comparable(request.params, setup.verify))
    loaded = fetch_and_load(setup)
    setup = setup.decided(loaded)
    check_beside(setup, compare=True, record=None)
    fast = setup.llm(loaded)
    announce_methods(setup, fast, request.params, notes)
    without = setup.plainly()
    plain = without.llm(loaded)
    request = request.met(fast)
    for llm in (plain, fast):
        warm_up(llm, request.params.constraint, request.task)
    announce(setup, screen, notes)
    live = screen is not None and screen.live
    plain_params = dataclasses.replace(request.params, prediction=None)
    before = write(plain, without, request.task, params=plain_params, screen=screen if live else None)
    if screen is not None:
        note(notes.dim(f"plain: {before.summary}"))
    fast_run = write(fast, setup, request.task, params=request.params, screen=screen)
    save_learned(fast)
    plain.forget()
    plain_runs = [before, write(plain, without, request.task, params=plain_params, screen=None)]
    equal = all(are_equal(run, fast_run) for run in plain_runs)
    if screen is None:
        beside = {"plain": report(before, loaded.model), "equal": equal, "speedup": speedup(plain_runs, fast_run)}
        say(dump(report(fast_run, loaded.model) | beside) + "\n")
    else:
        say_choice(setup, notes)
        note(notes.dim(f"{setup.draft}: {fast_run.summary}"))
        note(notes.dim(f"plain again: {plain_runs[1].summary}"))
        note(notes.bold(verdict(plain_runs, fast_run)))
    if not equal:
        raise typer.Exit(1)


def say_choice(setup: Setup, notes: Style) -> None:
    """Print what `auto` stood for, and why, if no drafter was named."""
    if setup.auto_note:
        note(notes.dim(setup.auto_note))


def announce(setup: Setup, screen: Screen | None, notes: Style) -> None:
    """Print once what the colours mean, if colours are shown."""
    if screen is not None and screen.style.coloured and notes.coloured and not setup.is_plain:
        note(f"{notes.accepted('drafted and accepted')}, target token")
