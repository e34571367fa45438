"""`draftree bench perplexity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftree.cli.bench.options import COMPARED, HOW, PROMPTS, Output, note_kernels, write_and_show
from draftree.cli.options import Device, Kernels, Model, Threads, TrustRemoteCode, require_new

if TYPE_CHECKING:
    from draftree.lab.bench.records import PerplexityRecord


def perplexity(
    model: Model,
    *,
    text: Annotated[Path, typer.Option(help="A file of UTF-8 text.", metavar="FILE", rich_help_panel=PROMPTS)],
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="auto, float32, bfloat16, float16, float64, int8, int4; repeatable, each is compared with the first.",
            metavar="KIND",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    window: Annotated[
        int, typer.Option(help="Maximum number of tokens per pass.", metavar="N", rich_help_panel=HOW)
    ] = 1024,
    limit: Annotated[
        int | None, typer.Option(help="Maximum number of tokens of the text.", metavar="N", rich_help_panel=PROMPTS)
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help="Dtype of keys and values with int8 or int4 weights.", metavar="NAME", rich_help_panel=HOW),
    ] = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    output: Output = None,
) -> None:
    """Measure the perplexity of a text; with several kinds of weights, compare each with the first."""
    require_new(output)
    from draftree.cli.progress import resolve_with_bar
    from draftree.lab.bench.perplexity import PerplexitySettings, measure

    settings = PerplexitySettings(
        model=model,
        text=text,
        weights=tuple(weights or ("auto",)),
        window=window,
        limit=limit,
        dtype=dtype,
        device=device,
        kernels=kernels,
        threads=threads,
        trust_remote_code=trust_remote_code,
    )
    header, records = measure(settings, fetch=resolve_with_bar)
    write_and_show(output, header, (("perplexity", noted(record, header["device"])) for record in records))


def noted(record: PerplexityRecord, device: str) -> PerplexityRecord:
    """Report why the passes of a record do not use native kernels, and return the record."""
    note_kernels({"kernels": record.kernels, "kernels_reason": record.kernels_reason, "device": device})
    return record
