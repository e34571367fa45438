"""The list of commands, each imported when it is used: help and lists do not wait for torch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.main import get_command

from draftree.cli.layout import PlainCommand, PlainGroup
from draftree.core.errors import harmless, suggestion
from draftree.version import __version__


class HarmlessFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def tame_log() -> None:
    """Log warnings to standard error as plain text, unless the program has configured logging."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(HarmlessFormatter())


@dataclass(frozen=True, slots=True)
class Entry:
    """A command that is not imported yet: the function or `typer.Typer` of its name in the module of its name."""

    panel: str  # title in the list of commands
    name: str
    summary: str
    examples: tuple[str, ...]  # lines that can be pasted into a shell

    def load(self) -> Any:
        """Import the command and prepare it for invocation."""
        attribute = self.name.replace("-", "_")
        run = getattr(import_module(f"draftree.cli.{attribute}"), attribute)
        holder = typer.Typer(rich_markup_mode=None, add_completion=False)
        holder.callback()(lambda: None)  # otherwise typer makes it a single command
        epilog = "\n".join(self.examples)
        if isinstance(run, typer.Typer):
            holder.add_typer(run, name=self.name, cls=run.info.cls or PlainGroup, epilog=epilog)
        else:
            holder.command(self.name, cls=PlainCommand, epilog=epilog)(run)
        return get_command(holder).commands[self.name]  # type: ignore[attr-defined]


PANELS: dict[str, dict[str, tuple[str, ...]]] = {
    "Generate": {
        "generate": (
            "Generate text.",
            'draftree generate smollm2-135m-instruct "What is a prime number?"',
            "draftree generate stories15m 'Once upon a time' --max-tokens 200 --seed 7",
            "cat task.txt | draftree generate smollm2-135m-instruct --draft ngram --compare",
            "draftree generate tinyllama-1.1b-chat --draft model:stories15m,k=4 --json 'Tell me a story.'",
        ),
        "chat": (
            "Chat with a model in the terminal.",
            "draftree chat smollm2-135m-instruct --draft ngram",
            "draftree chat tinyllama-1.1b-chat --draft model:stories15m,k=4 --temperature 0.7",
            "echo 'What is a prime number?' | draftree chat smollm2-135m-instruct --json",
        ),
        "beam": (
            "Search the most likely texts with beams.",
            "draftree beam stories15m 'Once upon a time' --beam-width 8 --num-return-sequences 3",
            "draftree beam smollm2-135m-instruct 'Translate to French: good morning' --length-penalty 0.6 --json",
            "draftree beam stories15m 'The cat' --force-phrase ' dog' --force-phrase ' tree' --max-new-tokens 40",
        ),
        "transcribe": (
            "Transcribe sound files.",
            "draftree transcribe whisper-tiny.en speech.wav",
            "draftree transcribe openai/whisper-tiny talk.wav --translate --format srt",
        ),
        "demo": (
            "Show a real model generate the same text, plain and with speculation.",
            "draftree demo",
            "draftree demo --dtype float32",
        ),
    },
    "Serve": {
        "serve": (
            "Serve models with an OpenAI-compatible HTTP API.",
            "draftree serve smollm2-135m-instruct",
            "draftree serve chat=smollm2-135m-instruct stories15m --draft suffix --draft chat=ngram,k=4",
            "draftree serve smollm2-135m-instruct --host 0.0.0.0 --api-key-file keys.txt",
        ),
        "verify-server": (
            "Serve models to devices that draft.",
            "draftree verify-server smollm2-135m-instruct",
        ),
        "watch": (
            "Show the load and the rounds of a running server.",
            "draftree watch http://127.0.0.1:8000",
            "draftree watch http://127.0.0.1:8000 --once --json",
        ),
    },
    "Choose and train": {
        "methods": (
            "List drafters, verifiers and planners.",
            "draftree methods",
            "draftree methods --json",
        ),
        "models": (
            "List, fetch, find and remove model weights.",
            "draftree models",
            "draftree models get smollm2-135m-instruct",
            "draftree models path smollm2-135m-instruct",
        ),
        "drafters": (
            "List the published drafters of a model, and which are here.",
            "draftree drafters Qwen/Qwen3-8B",
            "draftree drafters tinyllama-1.1b-chat --json",
        ),
        "doctor": (
            "Report how a model runs on this machine, and why.",
            "draftree doctor",
            "draftree doctor smollm2-135m-instruct --draft ngram",
            "draftree doctor tinyllama-1.1b-chat --draft model:stories15m,k=4 --measure",
        ),
        "explain": (
            "Explain the planner's decisions for a drafter with measurements.",
            "draftree explain smollm2-135m-instruct --draft ngram",
            "draftree explain tinyllama-1.1b-chat 'Tell me a story.' --draft model:stories15m",
        ),
        "tune": (
            "Measure which drafter is fastest for a model on this machine, and keep it.",
            "draftree tune smollm2-135m-instruct --minutes 10",
            "draftree tune --show",
            "draftree tune layers smollm2-135m-instruct --prompts prompts.jsonl --trials 60",
        ),
        "train": (
            "Make training data from a model's own texts, and train drafters.",
            "draftree train auto smollm2-135m-instruct --hours 2",
            "draftree train data smollm2-135m-instruct --output data --limit-tokens 100000",
            "draftree train head smollm2-135m-instruct --data data --output head --minutes 60",
            "draftree train export head --to speculators --target smollm2-135m-instruct --output exported",
        ),
    },
    "Measure": {
        "bench": (
            "Measure methods against plain decoding.",
            "draftree bench smollm2-135m-instruct --draft none --draft ngram",
            "draftree bench smollm2-135m-instruct --draft none --draft ngram --peer",
        ),
        "trace": (
            "Summarize recorded rounds, and convert them to timelines, tables and a page.",
            "draftree trace show trace.jsonl",
            "draftree trace export trace.jsonl --to chrome --output timeline.json",
            "draftree trace page trace.jsonl --output playground.html",
        ),
        "analyse": (
            "Draw measured acceptance and speed beside their theory.",
            "draftree analyse --list",
            "draftree analyse smollm2-135m-instruct --draft head:smollm2-135m-instruct --output figures",
            "draftree analyse --trace trace.jsonl --figures verified-cdf,phases --output figures",
        ),
        "size": (
            "Estimate the devices that serve a rate of requests.",
            "draftree size --model-size 8B --device h100 --devices 4 --rate 10",
            "draftree size --model-size 70B --device h100 --devices 16 --rate 5 --nodes 8 --tokens-per-round 2.8",
        ),
    },
}
"""Commands by panel and name: summary and examples of each."""
COMMANDS = {
    name: Entry(panel, name, summary, tuple(examples))
    for panel, commands in PANELS.items()
    for name, (summary, *examples) in commands.items()
}

GUESSES: dict[str, tuple[str, ...]] = {
    "--json": ("--format", "--output-format", "--jsonl", "-j"),
    "--max-tokens": ("--max-new-tokens", "--max-length", "--max-completion-tokens", "--num-predict", "--n-predict"),
    "--temperature": ("--temp", "--greedy", "--do-sample"),
    "--draft model:NAME": ("--draft-model", "--model-draft", "--assistant-model", "--assistant", "--speculative-model"),
    "--prompts": ("--prompt-file", "--prompts-file", "--input-file", "--file", "--input"),
    "--batch": ("--batch-size",),
    "--quantization": ("--quantize", "--quant"),
    "--dtype": ("--precision", "--torch-dtype"),
    "--threads": ("--num-threads", "--cpus"),
    "--system": ("--system-prompt",),
    "--n": ("--num-return-sequences", "--num-samples"),
    "--stop": ("--stop-strings", "--stop-sequences", "--stop-sequence"),
    "--seed": ("--random-seed",),
    "--output": ("--out", "--output-file"),
    "--api-key-file": ("--api-key", "--api-keys"),
    "--cors-origin": ("--allowed-origins", "--cors", "--cors-allow-origins"),
    "--allowed-host": ("--allowed-hosts", "--trusted-host", "--trusted-hosts"),
    "--max-batch-size": ("--max-num-seqs", "--parallel"),
    "--max-concurrent-requests": ("--concurrency", "--max-concurrency"),
    "--drain-timeout": ("--timeout-graceful-shutdown", "--graceful-timeout"),
    "--trials": ("--num-trials", "--n-trials"),
}
"""Other programs' names by the option that is meant."""


PROGRAM = "draftree"
WRONG_USAGE = 2
HELP_WIDTH = 100
COMPLETION_VARIABLE = "_DRAFTREE_COMPLETE"  # set by a shell that asks for completions
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The base class of all argument errors; typer exports only this subclass of it."""


class CommandTable(PlainGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing or cmd_name.startswith("-"):
                return None
            ctx.fail(f"there is no command '{cmd_name}': {suggestion(cmd_name, COMMANDS)}")
        return COMMANDS[cmd_name].load()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        widest = max(map(len, COMMANDS))
        for panel, commands in PANELS.items():
            with formatter.section(panel):
                formatter.write_dl([(f"{name:<{widest}}", summary) for name, (summary, *_) in commands.items()])


app = typer.Typer(
    cls=CommandTable,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH},
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
    version: bool = typer.Option(
        False, "--version", "-V", callback=print_version, is_eager=True, help="Print the version and exit."
    ),
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
    text = " ".join(message_of(error).split()).rstrip(".")
    place = PROGRAM if error.ctx is None else error.ctx.command_path
    sys.stderr.write(harmless(f"error: {text[:1].lower()}{text[1:]} (see '{place} --help')") + "\n")
    return WRONG_USAGE


def message_of(error: Any) -> str:
    """Return the message, with the option that an unknown option probably means."""
    if error.ctx is None or not hasattr(error, "possibilities"):
        return str(error.format_message())
    parameters = error.ctx.command.get_params(error.ctx)
    options = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    guess = next((name for name, guesses in GUESSES.items() if error.option_name in guesses), None)
    if guess is None or guess.split()[0] not in options:
        guess = next(iter(error.possibilities or ()), None)
    return error.message if guess is None else f"{error.message}: did you mean '{guess}'?"
