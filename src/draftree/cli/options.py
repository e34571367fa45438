"""Options that several commands take: which model, and how it is run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.completion import complete_draft, complete_model, complete_plan, complete_verify
from draftree.cli.render import Colour
from draftree.core.errors import ConfigurationError

TEXT = "Text"
RUNNING = "How the model is run"
SPECULATION = "Speculation"
OUTPUT = "Output"

Model = Annotated[
    str,
    typer.Argument(
        help="A name of 'draftree models', a folder, a GGUF file or a hub id.",
        metavar="MODEL",
        autocompletion=complete_model,
        rich_help_panel="Arguments",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", metavar="NAME", rich_help_panel=RUNNING)]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16, float16 or float64.", metavar="NAME", rich_help_panel=RUNNING)
]
Kernels = Annotated[
    str,
    typer.Option(help="What computes passes: auto, native, torch or graphs.", metavar="NAME", rich_help_panel=RUNNING),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="int8 for weights of 8 bits: faster, and another model; as they come if not given.",
        metavar="NAME",
        rich_help_panel=RUNNING,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that lies beside the weights, where a model needs it.",
        rich_help_panel=RUNNING,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads of passes; torch's own choice if not given.", metavar="N", rich_help_panel=RUNNING),
]
Verify = Annotated[
    str,
    typer.Option(
        help="The rule that keeps guesses.",
        metavar="RULE",
        autocompletion=complete_verify,
        rich_help_panel=SPECULATION,
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        help="What guesses ahead: none, ngram, suffix, prediction, model:NAME; options behind commas (ngram,k=4).",
        metavar="SPEC",
        autocompletion=complete_draft,
        rich_help_panel=SPECULATION,
    ),
]
Plan = Annotated[
    str | None,
    typer.Option(
        help="How far ahead is guessed, such as fixed:4 or heuristic; as far as pays if not given (auto).",
        metavar="POLICY",
        autocompletion=complete_plan,
        rich_help_panel=SPECULATION,
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Prompt as a message, or as the beginning of a text; a chat if the model has a template.",
        rich_help_panel=TEXT,
    ),
]
System = Annotated[str | None, typer.Option(help="System message of the chat.", metavar="TEXT", rich_help_panel=TEXT)]
AllowControlTokens = Annotated[
    bool,
    typer.Option(
        "--allow-control-tokens",
        help="Read control tokens in the prompt of a chat, such as <|im_end|>, as such; as text if not given.",
        rich_help_panel=TEXT,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)]
When = Annotated[
    Colour,
    typer.Option(
        "--colour",
        "--color",
        help="Accepted tokens in another colour: auto, always or never.",
        metavar="WHEN",
        rich_help_panel=OUTPUT,
    ),
]


def require_new(output: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is loaded or measured."""
    if output is None:
        return
    if output.exists():
        raise ConfigurationError(f"'{output}' is there already, and nothing is overwritten: give another name")
    if not output.absolute().parent.is_dir() or not os.access(output.absolute().parent, os.W_OK):
        raise ConfigurationError(f"'{output}' cannot be written: its folder is not there, or is not yours to write")
