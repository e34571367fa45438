"""Options that several commands share: the model, and how it is run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.completion import complete_draft, complete_model, complete_plan, complete_verify
from draftree.cli.render import Colour
from draftree.core.errors import ConfigurationError

TEXT = "Text"
RUNNING = "Execution"
SAMPLING = "Sampling"
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
Prompt = Annotated[
    str | None,
    typer.Argument(
        help="The prompt; '-', or none with a pipe: standard input without its final line break.",
        metavar="PROMPT",
        rich_help_panel="Arguments",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", metavar="NAME", rich_help_panel=RUNNING)]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16, float16 or float64.", metavar="NAME", rich_help_panel=RUNNING)
]
Kernels = Annotated[
    str,
    typer.Option(
        help="Implementation of passes: auto, native, torch or graphs.", metavar="NAME", rich_help_panel=RUNNING
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        help="int8 or int4 for weights of 8 or 4 bits: faster, but a different model; unquantized if not given.",
        metavar="NAME",
        rich_help_panel=RUNNING,
    ),
]
Offload = Annotated[
    str | None,
    typer.Option(
        help="Memory for weights, such as 8GB: other layers are read from a file in every pass.",
        metavar="SIZE",
        rich_help_panel=RUNNING,
    ),
]
KvDtype = Annotated[
    str | None,
    typer.Option(
        help="int8 for keys and values of 8 bits: half the memory, but other texts; the model's dtype if not given.",
        metavar="NAME",
        rich_help_panel=RUNNING,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Allow Python code from the model's folder, for models that need it.",
        rich_help_panel=RUNNING,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads of passes; if not given, one for each fast core of a memory node, within the quota.",
        metavar="N",
        rich_help_panel=RUNNING,
    ),
]
Affinity = Annotated[
    str | None,
    typer.Option(
        help="Processors of all threads: auto (those that 'draftree doctor' shows), none, or a list such as 0-3,8. If "
        "not given: auto on machines with several memory nodes or kinds of cores.",
        metavar="LIST",
        rich_help_panel=RUNNING,
    ),
]
Verify = Annotated[
    str,
    typer.Option(
        help="The verifier.",
        metavar="RULE",
        autocompletion=complete_verify,
        rich_help_panel=SPECULATION,
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        help="The drafter: auto (chosen for the model), none, ngram, suffix, prediction, model:NAME, head:NAME; "
        "options after commas (ngram,k=4).",
        metavar="SPEC",
        autocompletion=complete_draft,
        rich_help_panel=SPECULATION,
    ),
]
Plan = Annotated[
    str | None,
    typer.Option(
        help="The planner of draft sizes, such as fixed:4 or heuristic; auto if not given.",
        metavar="POLICY",
        autocompletion=complete_plan,
        rich_help_panel=SPECULATION,
    ),
]
Learn = Annotated[
    str | None,
    typer.Option(
        help="Drafters learn from verified texts: server; server,folder=PATH keeps what was learned for later runs.",
        metavar="SCOPE",
        rich_help_panel=SPECULATION,
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Treat the prompt as a message or as plain text; default: a message if the model has a chat template.",
        rich_help_panel=TEXT,
    ),
]
System = Annotated[str | None, typer.Option(help="System message of the chat.", metavar="TEXT", rich_help_panel=TEXT)]
AllowControlTokens = Annotated[
    bool,
    typer.Option(
        "--allow-control-tokens",
        help="Encode control tokens such as <|im_end|> in a chat prompt as such; spelled as text if not given.",
        rich_help_panel=TEXT,
    ),
]
GenerationConfig = Annotated[
    str,
    typer.Option(
        help="auto: sampling defaults of the model, in its generation_config.json; none: no defaults of the model.",
        metavar="auto|none",
        rich_help_panel=SAMPLING,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=OUTPUT)]
When = Annotated[
    Colour,
    typer.Option(
        "--colour",
        "--color",
        help="Colour accepted tokens: auto, always or never.",
        metavar="WHEN",
        rich_help_panel=OUTPUT,
    ),
]


def require_new(output: Path | None) -> None:
    """Refuse an output path that exists or is not writable, before anything is loaded or measured."""
    if output is None:
        return
    if output.exists():
        raise ConfigurationError(f"'{output}' already exists, and files are never overwritten: choose another path")
    if not output.absolute().parent.is_dir() or not os.access(output.absolute().parent, os.W_OK):
        raise ConfigurationError(
            f"'{output}' cannot be written: its folder is missing or not writable; choose another path"
        )
