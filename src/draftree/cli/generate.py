"""`draftree generate`: generation for one prompt or a file of prompts, with n texts each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftree.cli.flags import sampling_of
from draftree.cli.layout import OUTPUT, option, refuse
from draftree.cli.options import (
    ALL_OPTIONS,
    AS_JSON,
    CHAT,
    COLOUR,
    IMAGES,
    PARALLEL_OPTIONS,
    PROMPT,
    SYSTEM,
    TEXT,
    DecoderFlags,
    Setup,
    import_engine,
    require_new,
    takes,
    takes_setup,
    values_of,
)
from draftree.cli.prompt import Request, Task, checked_images, read_prompt, read_prompts
from draftree.cli.render import Colour, Style, is_terminal
from draftree.loading.resolve import require_sound
from draftree.parallel.entry import leave_to_rank_zero
from draftree.sampling.params import SamplingParams

if TYPE_CHECKING:
    from draftree.options import DecoderOptions


STREAM: Any = option(
    None,
    "Show the text while it is generated; default: only on a terminal.",
    panel=OUTPUT,
    names="--stream/--no-stream",
)


@takes("params", sampling_of())
@takes_setup(*ALL_OPTIONS, *PARALLEL_OPTIONS)
@takes("decoder", values_of(DecoderFlags))
def generate(
    prompt: str | None = PROMPT,
    *,
    context: typer.Context,
    prompts: str | None = option(
        None, "File of prompts that run concurrently: one per line, or JSON lines; '-' is standard input.", "FILE", TEXT
    ),
    setup: Setup,
    decoder: DecoderOptions,
    chat: bool | None = CHAT,
    system: str | None = SYSTEM,
    images: list[str] = IMAGES,
    stream: bool | None = STREAM,
    colour: Colour = COLOUR,
    as_json: bool = AS_JSON,
    compare: bool = option(
        False,
        "Also decode plainly with the same seed; exit status 1 if the texts differ.",
        panel=OUTPUT,
        names="--compare",
    ),
    record: Path | None = option(
        None, "A trace of all rounds, for 'draftree trace' and 'draftree analyse'.", "FILE", OUTPUT
    ),
    params: SamplingParams,
) -> None:
    """Generate text. The text goes to standard output, everything else to standard error."""
    leave_to_rank_zero(setup)
    check_output(params, as_json=as_json, stream=stream, colour=colour)
    no_effect = "control tokens are always encoded as such with --no-chat: omit one of the two options"
    refuse(chat is False and setup.allow_control_tokens, "--allow-control-tokens", no_effect)
    require_new(record)
    if prompts is not None:
        refuse(prompt is not None, "PROMPT", "both a prompt and --prompts were given: leave one of them out")
        for name, is_given in (("--stream", stream), ("--compare", compare), ("--image", images)):
            refuse(is_given, name, f"it applies to one prompt, and --prompts gives several: leave {name} out")
    batch = None if prompts is None else read_prompts(prompts)
    task = Task(read_prompt(prompt) if batch is None else "", system, chat, decoder, checked_images(images))
    require_sound(setup.model)
    import_engine()
    from draftree.cli.runs import Screen, check_beside, compare_and_report, write_and_report

    check_material(setup, params)
    check_beside(setup, compare=compare, record=record)
    live = params.n == 1 and (is_terminal(sys.stdout) if stream is None else stream)
    screen = None if as_json else Screen(Style.chosen(colour, sys.stdout), live=live)
    notes = Style.chosen(colour, sys.stderr)
    source = context.get_parameter_source("max_tokens")
    request = Request(task, params, fits_context=source is not None and source.name == "DEFAULT")
    if batch is not None:
        from draftree.cli.batch import write_prompts

        write_prompts(setup, batch, request, screen=screen, notes=notes, record=record)
    elif compare:
        compare_and_report(setup, request, screen, notes)
    else:
        write_and_report(setup, request, screen, notes=notes, record=record)


def check_output(params: SamplingParams, *, as_json: bool, stream: bool | None, colour: Colour) -> None:
    """Check that the output options fit together and to the parameters."""
    refuse(as_json and stream, "--stream", "--json prints one object at the end: leave --stream out")
    is_coloured = colour is Colour.ALWAYS
    refuse(as_json and is_coloured, "--colour", "--json prints one object without colours: leave one of them out")
    refuse(stream and params.n > 1, "--n", f"--n {params.n} texts cannot be shown as one: leave --stream out")
    for name, count in (("--logprobs", params.logprobs), ("--prompt-logprobs", params.prompt_logprobs)):
        refuse(count is not None and not as_json, name, "log-probabilities are shown in the object of --json: add it")


def check_material(setup: Setup, params: SamplingParams) -> None:
    """Check that a prediction and a drafter that uses it occur together, and likewise for grammars."""
    traits = setup.methods().traits
    refuse(
        params.prediction is not None and not traits.reads_predictions,
        "--prediction",
        "no drafter uses the prediction: add '--draft prediction', or merge it with another, "
        "'--draft prediction+suffix'",
    )
    missing = "has nothing to draft from: give"
    refuse(
        traits.reads_predictions and params.prediction is None,
        "--draft",
        f"drafter 'prediction' {missing} a file with --prediction",
    )
    refuse(
        traits.reads_grammars and params.constraint is None,
        "--draft",
        f"drafter 'grammar' {missing} --json-schema, --regex or --grammar",
    )
