"""The commands, each imported when it is used: help and lists do not wait for torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command

from draftree.cli.entries import COMMANDS, Entry
from draftree.cli.guesses import suggested_option
from draftree.cli.layout import PlainGroup
from draftree.core.errors import harmless, suggestion
from draftree.version import __version__

__all__ = ["COMMANDS", "Entry", "app", "invoke"]

PROGRAM = "draftree"
WRONG_USAGE = 2
COMPLETION_VARIABLE = "_DRAFTREE_COMPLETE"
"""Set by a shell that asks for completions."""
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The base class of all argument errors; typer exports only this subclass of it."""


class CommandTable(PlainGroup):
    """The commands of the table above."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command."""
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing or cmd_name.startswith("-"):
                return None
            ctx.fail(f"there is no command '{cmd_name}': {suggestion(cmd_name, COMMANDS)}")
        return COMMANDS[cmd_name].load()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List names and summaries without imports."""
        with formatter.section("Commands"):
            formatter.write_dl([(entry.name, entry.summary) for entry in COMMANDS.values()])


app = typer.Typer(
    cls=CommandTable,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="draftree demo\ndraftree generate smollm2-135m-instruct 'What is a prime number?' --draft ngram",
)


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Fast lossless generation with any Hugging Face causal language model."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit status. Errors other than wrong usage propagate."""
    command = get_command(app)
    try:
        if COMPLETION_VARIABLE in os.environ:
            return complete(command, arguments)
        # not the command's own main, which handles Ctrl-C and closed pipes itself
        with command.make_context(PROGRAM, list(arguments)) as context:
            context.command.invoke(context)
    except typer.Exit as leaving:
        return leaving.exit_code
    except typer.Abort as aborted:
        raise KeyboardInterrupt from aborted
    except UsageError as error:
        return explain(error)
    return 0


def complete(command: Any, arguments: Sequence[str]) -> int:
    """Answer a shell's completion request; returns the exit status."""
    try:
        command.main(list(arguments), prog_name=PROGRAM)
    except SystemExit as leaving:  # completion exits the program
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def explain(error: Any) -> int:
    """Print the usage error; a group without a command prints its help instead. Returns the exit status."""
    if error.ctx is not None and error.format_message() == error.ctx.get_help():
        typer.echo(error.format_message())
        return 0
    sys.stderr.write(f"error: {harmless(usage_sentence(error))}\n")
    return WRONG_USAGE


def message_of(error: Any) -> str:
    """Return the error message, with a suggestion for an unknown option."""
    if error.ctx is None or not hasattr(error, "possibilities"):
        return str(error.format_message())
    parameters = error.ctx.command.get_params(error.ctx)
    options = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    meant = suggested_option(error.option_name, options, error.possibilities or ())
    return error.message if meant is None else f"{error.message}: did you mean '{meant}'?"


def usage_sentence(error: Any) -> str:
    """Return the usage error and a pointer to the help in one line."""
    text = " ".join(message_of(error).split()).rstrip(".")
    place = PROGRAM if error.ctx is None else error.ctx.command_path
    return f"{text[:1].lower()}{text[1:]} (see '{place} --help')"
