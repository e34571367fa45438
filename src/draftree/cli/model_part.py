"""`draftree models part`: the part of a model that a device needs whose other layers run on a verify server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.completion import complete_model
from draftree.cli.sizes import short_bytes
from draftree.core.errors import harmless
from draftree.core.files import expanded

__all__ = ["write_part"]


def write_part(
    name: Annotated[str, typer.Argument(help="A name, folder or hub id.", autocompletion=complete_model)],
    split: Annotated[int, typer.Option(help="First layers to keep, as for the verify server's --split.", metavar="N")],
    to: Annotated[Path, typer.Option(help="New folder for the part.", metavar="FOLDER", file_okay=False)],
) -> None:
    """Write the first layers of a model, with embedding, final norm and output head, for a device.

    The device names the folder as weights of its target: 'remote:URL?split=N&weights=FOLDER'.
    """
    # here, since it imports torch
    from draftree.loading.first_layers import write_first_layers

    written = write_first_layers(name, split, expanded(str(to)))
    share = f"{short_bytes(written.num_bytes)} of {short_bytes(written.whole_bytes)}"
    typer.echo(f"{harmless(str(written.folder))}: {split} of {written.num_layers} layers, {share}")
