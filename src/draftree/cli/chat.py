"""`draftree chat`: an interactive conversation with a model in the terminal, or line by line through a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from draftree.cli.flags import sampling_of
from draftree.cli.generate import STREAM
from draftree.cli.options import ALL_OPTIONS, AS_JSON, COLOUR, IMAGES, SYSTEM, Setup, import_engine, takes, takes_setup
from draftree.cli.prompt import checked_images
from draftree.cli.render import Colour, Style, is_terminal, note, say
from draftree.loading.resolve import require_sound
from draftree.sampling.params import SamplingParams

if TYPE_CHECKING:
    from draftree.cli.chat_session import Drafting


MAX_TOKENS = 1024  # default maximum length of an answer
DEFAULTS = {"max_tokens": MAX_TOKENS}
NOT_OF_CHATS = frozenset({"n", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "prediction"})
"""Sampling parameters that a conversation has no use for."""


@takes("params", sampling_of(without=NOT_OF_CHATS, defaults=DEFAULTS))
@takes_setup(*(name for name in ALL_OPTIONS if name != "learn"))
def chat(
    *,
    context: typer.Context,
    setup: Setup,
    system: str | None = SYSTEM,
    images: list[str] = IMAGES,
    stream: bool | None = STREAM,
    colour: Colour = COLOUR,
    as_json: bool = AS_JSON,
    params: SamplingParams,
) -> None:
    """Chat with a model. /help lists the commands of the chat.

    Through a pipe, every line of standard input is a message, and the answers go to standard output.
    """
    from draftree.cli.generate import check_output

    check_output(params, as_json=as_json, stream=stream, colour=colour)
    pictures = checked_images(images)
    require_sound(setup.model)
    import_engine()
    from draftree.cli.chat_session import Conversation, Drafting, PipeReader, Session, TerminalReader
    from draftree.cli.runs import Screen

    is_interactive = is_terminal(sys.stdin) and is_terminal(sys.stdout) and not as_json
    answers = Style.chosen(colour, sys.stdout)
    notes = answers if is_interactive else Style.chosen(colour, sys.stderr)
    live = is_terminal(sys.stdout) if stream is None else stream
    source = context.get_parameter_source("max_tokens")
    drafting = Drafting(setup, has_grammar=params.constraint is not None)
    session = Session(
        drafting=drafting,
        conversation=Conversation(system, pictures),
        params=drafting.llm.requests.resolved(params),
        reader=TerminalReader(answers) if is_interactive else PipeReader(),
        screen=None if as_json else Screen(answers, live=live),
        notes=notes,
        fits_context=source is not None and source.name == "DEFAULT",
    )
    for line in filter(None, (drafting.llm.draft_note, drafting.llm.sampling_note)):
        note(notes.dim(line))
    if is_interactive:
        greet(drafting, answers)
    session.warn_if_lossy()
    session.run()


def greet(drafting: Drafting, style: Style) -> None:
    setup = drafting.setup
    say(style.dim(f"{setup.model}, drafter {drafting.name}, kernels {drafting.llm.kernels}") + "\n")
    if setup.auto_note:
        say(style.dim(setup.auto_note) + "\n")
    if style.coloured:
        say(f"{style.accepted('drafted and accepted')}, target token\n")
    say(style.dim("/help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves") + "\n")
