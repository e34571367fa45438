"""`draftree train export`: a drafter in the layout that another project's server reads, or as this package ships it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.render import note, say
from draftree.core.errors import ConfigurationError, suggestion

__all__ = ["export"]

PACKAGE = "package"
SERVERS = ("speculators", "sglang", PACKAGE)
"""Values of `--to`: the layout of speculators for vLLM, folders for SGLang, and heads of this package."""


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a head, or of a small whole model.", metavar="FOLDER")],
    *,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="speculators (for vLLM), sglang, or package: the small folder in which this package ships a head.",
            metavar="|".join(SERVERS),
            show_default=False,
        ),
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
    licence: Annotated[
        str | None,
        typer.Option(
            help="With --to package: licence of the weights; the target's in 'draftree models' if not given.",
            metavar="NAME",
        ),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="With --to package: store matrices in 8 bits.")] = False,
) -> None:
    """Write a drafter for vLLM or SGLang and print how to serve it, or write the folder of a head of this package."""
    if to not in SERVERS:
        raise ConfigurationError(f"option --to is '{to}': {suggestion(to, SERVERS)}")
    if to == PACKAGE:
        if served_as is not None:
            raise typer.BadParameter("--to package names the target by itself: leave it out", param_hint="--served-as")
        from draftree.train.shipping import ship_head

        say(
            "".join(f"{line}\n" for line in ship_head(folder, target=target, output=output, licence=licence, int8=int8))
        )
        return
    if licence is not None or int8:
        option = "--int8" if licence is None else "--licence"
        raise typer.BadParameter("only --to package takes it: leave it out", param_hint=option)
    from draftree.train.export import export_drafter

    lines = export_drafter(folder, to=to, target=target, output=output, served_as=served_as)
    note(f"wrote {output}; serve it with:")
    say("".join(f"{line}\n" for line in lines))
