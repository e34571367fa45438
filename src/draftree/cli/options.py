"""Options that several commands take: which model, and how it is run."""

from __future__ import annotations

from typing import Annotated

import typer

RUNNING = "How the model is run"

Model = Annotated[
    str,
    typer.Argument(
        help="A name of 'draftree models', a folder, a GGUF file or a hub id.",
        metavar="MODEL",
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
Threads = Annotated[
    int | None,
    typer.Option(help="Threads of torch; its own choice if not given.", metavar="N", rich_help_panel=RUNNING),
]
