"""`draftree models cache`: what the cache keeps for later starts."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftree.cli.options import AsJson
from draftree.core.errors import harmless

__all__ = ["show_cache"]


def show_cache(
    clear: Annotated[
        bool,
        typer.Option("--clear", help="Remove all records and packed weights; the next starts take longer."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the records and packed weights of loaded models, which shorten their next start."""
    if clear and as_json:
        raise typer.BadParameter("--clear has no output: leave one of them out", param_hint="--json")
    # here, since they import torch
    from draftree.loading.packed_start import SWITCH as PACKED_SWITCH
    from draftree.loading.packed_start import keeps_packed, packed_folders, remove_packed
    from draftree.loading.warm_start.store import SWITCH, Store

    store, packed = Store(), packed_folders()
    if clear:
        freed = sum(size for _, size in packed)
        text = f"removed {store.clear()} records, {remove_packed()} copies of packed weights ({freed / 1e6:.0f} MB)"
        Console(stderr=True).print(text, highlight=False)
        return
    kept = [
        {"folder": facts.get("folder"), "dtype": facts.get("dtype"), "quantization": facts.get("quantization")}
        | {"bytes": status.st_size, "made": datetime.fromtimestamp(status.st_mtime).isoformat(timespec="seconds")}
        for path, status in store.entries()
        for facts in [store.facts(path)]
    ]
    if as_json:
        copies = [{"folder": str(folder), "bytes": size} for folder, size in packed]
        found = {"cache": str(store.folder), "is_on": store.is_on, "kept": kept}
        typer.echo(json.dumps(found | {"keeps_packed": keeps_packed(), "packed": copies}, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("made", "weights", "bytes"):
        table.add_column(heading, no_wrap=True, justify="right" if heading == "bytes" else "left")
    table.add_column("model", overflow="fold")
    for one in kept:
        weights = one["quantization"] or one["dtype"] or ("tokenizer" if one["folder"] else "?")
        where = str(one["folder"] or "cannot be read")
        table.add_row(str(one["made"]), str(weights), f"{one['bytes']:,}", escape(harmless(where)))
    for folder, size in packed:
        made = datetime.fromtimestamp(folder.stat().st_mtime).isoformat(timespec="seconds")
        table.add_row(made, "packed", f"{size:,}", escape(harmless(str(folder))))
    console = Console()
    if kept or packed:
        console.print(table)
    for name, switch, is_on in (("cache", SWITCH, store.is_on), ("packed weights", PACKED_SWITCH, keeps_packed())):
        place = store.folder if name == "cache" else store.folder.parent / "packed"
        state = f"on ({switch}=0 switches it off)" if is_on else f"off ({switch}=0)"
        console.print(f"{name}: {place}, {state}", highlight=False, soft_wrap=True)
