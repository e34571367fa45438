"""`draftree train export`: a drafter in the layout that another project's server reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.render import note, say
from draftree.core.errors import ConfigurationError, suggestion

__all__ = ["export"]

SERVERS = ("speculators", "sglang")
"""Values of `--to`: the layout of speculators for vLLM, folders for SGLang."""


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a head, or of a small whole model.", metavar="FOLDER")],
    *,
    to: Annotated[
        str,
        typer.Option("--to", help="speculators (for vLLM) or sglang.", metavar="|".join(SERVERS), show_default=False),
    ],
    target: Annotated[
        str,
        typer.Option(help="The target: a name of 'draftree models', a folder or a hub id.", metavar="MODEL"),
    ],
    output: Annotated[Path, typer.Option(help="New folder.", metavar="FOLDER")],
    served_as: Annotated[
        str | None,
        typer.Option(
            help="Name of the target in the files, such as a hub id; its folder if not given.", metavar="NAME"
        ),
    ] = None,
) -> None:
    """Write a drafter for vLLM or SGLang, and print how to serve it."""
    if to not in SERVERS:
        raise ConfigurationError(f"option --to is '{to}': {suggestion(to, SERVERS)}")
    from draftree.train.export import export_drafter

    lines = export_drafter(folder, to=to, target=target, output=output, served_as=served_as)
    note(f"wrote {output}; serve it with:")
    say("".join(f"{line}\n" for line in lines))
