"""`draftree bench passes`."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.bench.options import COMPARED, HOW, Output, listed, write_and_show
from draftree.cli.options import Device, Dtype, Kernels, Model, Quantization, Threads, TrustRemoteCode, require_new


def passes(
    model: Model,
    *,
    rows: Annotated[
        str, typer.Option(help="Numbers of tokens per pass.", metavar="N,N,...", rich_help_panel=COMPARED)
    ] = "1,2,4,8,16,32,64",
    prefix: Annotated[
        int, typer.Option(help="Number of tokens in the cache before the pass.", metavar="N", rich_help_panel=COMPARED)
    ] = 256,
    trees: Annotated[
        str | None,
        typer.Option(
            help="Trees to score in one pass, path by path, and as a chain of equal size: 2-2-2,4-2-1.",
            metavar="SHAPE,...",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    drafts: Annotated[
        str | None,
        typer.Option(
            help="Trees that the model drafts, with the time in passes: 1-1-1,best-32.",
            metavar="SHAPE,...",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Number of passes of each kind.", metavar="N", rich_help_panel=HOW)] = 20,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    quantization: Quantization = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    output: Output = None,
) -> None:
    """Time passes of a model by number of tokens, with the lower bound from memory bandwidth."""
    require_new(output)
    counts = listed(rows, "--rows", kind=int, example="1,2,4")
    from draftree.bench.pass_times import PassSettings, measure
    from draftree.cli.models import resolve_with_bar

    settings = PassSettings(
        model=model,
        rows=counts,
        prefix=prefix,
        repeats=repeats,
        trees=tuple(trees.split(",") if trees else ()),
        drafts=tuple(drafts.split(",") if drafts else ()),
        dtype=dtype,
        device=device,
        kernels=kernels,
        quantization=quantization,
        threads=threads,
        trust_remote_code=trust_remote_code,
    )
    header, records, tree_records = measure(settings, fetch=resolve_with_bar)
    lines = [*(("pass", record) for record in records), *(("tree", tree) for tree in tree_records)]
    write_and_show(output, header, lines)
