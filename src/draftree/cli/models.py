"""`draftree models`: the models in package registries and in the cache; download, check and removal."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftree.cli.layout import PlainCommand, argument, option, refuse
from draftree.cli.options import AS_JSON, complete_cached, complete_model
from draftree.cli.render import resolve_with_bar, short_bytes, short_count
from draftree.core.errors import ModelNotFoundError, harmless, suggestion
from draftree.core.files import expanded
from draftree.loading.resolve import (
    gguf_path,
    hub_cache,
    prepared_folder,
    require_clients,
    require_extras,
    resolve_model,
)
from draftree.weights.cache import Cache
from draftree.weights.catalogue import CATALOGUE, CatalogueEntry
from draftree.weights.install import check_gguf, check_sums, entry_is_here, has_sums, is_block_description


def show_cache(
    clear: bool = option(False, "Remove all records and packed weights; the next starts take longer.", names="--clear"),
    as_json: bool = AS_JSON,
) -> None:
    """List the records and packed weights of loaded models, which shorten their next start."""
    refuse(clear and as_json, "--json", "--clear has no output: leave one of them out")
    # here, since they import torch
    from draftree.loading.native_start import SWITCH as PACKED_SWITCH
    from draftree.loading.native_start import keeps_packed, packed_folders, remove_packed
    from draftree.loading.records import SWITCH, Store

    store, packed = Store(), packed_folders()
    if clear:
        freed = sum(size for _, size in packed)
        text = f"removed {store.clear()} records, {remove_packed()} copies of packed weights ({freed / 1e6:.0f} MB)"
        Console(stderr=True).print(text, highlight=False)
        return
    records = [
        {"folder": facts.get("folder"), "dtype": facts.get("dtype"), "quantization": facts.get("quantization")}
        | {"bytes": status.st_size, "made": when(status)}
        for path, status in store.entries()
        for facts in [store.facts(path)]
    ]
    if as_json:
        copies = [{"folder": str(folder), "bytes": size} for folder, size in packed]
        about = {"cache": str(store.folder), "is_on": store.is_on, "kept": records}
        typer.echo(json.dumps(about | {"keeps_packed": keeps_packed(), "packed": copies}, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("made", "weights", "bytes"):
        table.add_column(heading, no_wrap=True, justify="right" if heading == "bytes" else "left")
    table.add_column("model", overflow="fold")
    for record in records:
        weights = record["quantization"] or record["dtype"] or ("tokenizer" if record["folder"] else "?")
        folder = str(record["folder"] or "cannot be read")
        table.add_row(str(record["made"]), str(weights), f"{record['bytes']:,}", escape(harmless(folder)))
    for place, size in packed:
        table.add_row(when(place.stat()), "packed", f"{size:,}", escape(harmless(str(place))))
    console = Console()
    if records or packed:
        console.print(table)
    caches = (
        ("cache", store.folder, SWITCH, store.is_on),
        ("packed weights", store.folder.parent / "packed", PACKED_SWITCH, keeps_packed()),
    )
    for name, place, switch, is_on in caches:
        state = f"on ({switch}=0 switches it off)" if is_on else f"off ({switch}=0)"
        console.print(f"{name}: {place}, {state}", highlight=False, soft_wrap=True)


def when(status: os.stat_result) -> str:
    return datetime.fromtimestamp(status.st_mtime).isoformat(timespec="seconds")


def write_part(
    name: str = argument(..., "A name, folder or hub id.", complete=complete_model),
    split: int = option(..., "First layers to keep, as for the verify server's --split.", "N"),
    to: Path = typer.Option(..., help="New folder for the part.", metavar="FOLDER", file_okay=False),
) -> None:
    """Write the first layers of a model, with embedding, final norm and output head, for a device.

    The device names the folder as weights of its target: 'remote:URL?split=N&weights=FOLDER'.
    """
    # here, since it imports torch
    from draftree.loading.first_layers import write_first_layers

    written = write_first_layers(name, split, expanded(str(to)))
    share = f"{short_bytes(written.num_bytes)} of {short_bytes(written.whole_bytes)}"
    typer.echo(f"{harmless(str(written.folder))}: {split} of {written.num_layers} layers, {share}")


models = typer.Typer(help="List, fetch, find, cut and remove model weights.", no_args_is_help=False)
models.command("part", cls=PlainCommand)(write_part)

NAMES_HELP = "Names of the list, or 'all'."
NAMES: Any = argument(..., NAMES_HELP, "NAME...", complete=complete_model)


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One line of the list; `kind` is "registry", "hub", "GGUF" or "cache"."""

    name: str
    kind: str
    description: str
    disk_bytes: int
    licence: str
    folder: str | None
    parameters: int | None = None
    download_bytes: int | None = None
    vocabulary: int | None = None
    context: int | None = None


@models.callback(invoke_without_command=True)
def default(context: typer.Context, as_json: bool = AS_JSON) -> None:
    """List the available models if no other action is named."""
    if context.invoked_subcommand is None:
        show_list(as_json=as_json)
    else:
        refuse(as_json, "--json", f"write --json after '{context.invoked_subcommand}'")


@models.command("list", cls=PlainCommand)
def list_models(as_json: bool = AS_JSON) -> None:
    """List the models in package registries and in the cache."""
    show_list(as_json=as_json)


@models.command("path", cls=PlainCommand)
def print_path(
    name: str = argument(..., "A name, folder, GGUF file or hub id.", complete=complete_model),
) -> None:
    """Print the folder of a model that is on this machine; of a GGUF file, that of its configuration and tokenizer."""
    typer.echo(prepared_folder(name, fetch=False, convert=False))


@models.command("get", cls=PlainCommand)
def get_models(names: list[str] = NAMES) -> None:
    """Download models and convert them into the cache; complete models are left unchanged."""
    wanted = list(CATALOGUE) if names == ["all"] else names
    # Unavailable models are refused before the first large download; hub names are checked by their own download
    for require in (require_extras, require_clients):
        for name in wanted:
            require(name)
    folders = {name: resolve_with_bar(name) for name in sorted(wanted, key=lambda name: name in CATALOGUE)}
    for name in wanted:
        typer.echo(folders[name])


@models.command("check", cls=PlainCommand)
def check_models(names: list[str] = NAMES) -> None:
    """Read every file of models that are on this machine, and compare it with its checksum."""
    cache = Cache()
    for name in cache.names() if names == ["all"] else names:
        file = gguf_path(name)
        was_known = check_folder(name, cache) if file is None else check_gguf(file, cache)
        known = "intact" if was_known else "readable; no checksums are recorded for it"
        typer.echo(f"{harmless(name)}: {known}")


def check_folder(name: str, cache: Cache) -> bool:
    """Check a model's folder, or what the cache holds of a GGUF file; return whether checksums were recorded."""
    is_held = name in cache.names()
    folder = cache.folder(name)
    # before an older version's model is checked for the first time, which records its sums
    was_known = is_held and has_sums(folder, cache)
    if not (is_held and is_block_description(folder)):
        folder = resolve_model(name, fetch=False)
    was_known = was_known or (not is_held and has_sums(folder, cache))
    check_sums(folder, cache, again=True)
    return was_known


@models.command("remove", cls=PlainCommand)
def remove_models(names: list[str] = argument(..., NAMES_HELP, "NAME...", complete=complete_cached)) -> None:
    """Remove models from the cache, or by name from the hub client's cache, which other programs share."""
    cache = Cache()
    hub = {row.name: Path(row.folder) for row in hub_rows() if row.folder}
    wanted = cache.names() if names == ["all"] else names
    for name in wanted:
        if cache.manifest(name) is None and name not in hub:
            known = [*cache.names(), *hub]
            held = suggestion(name, known) if known else "the cache is empty"
            raise ModelNotFoundError(f"'{name}' is not in the cache, so it cannot be removed: {held}")
    from draftree.loading.native_start import packed_folders, remove_packed  # here, since it imports torch

    console = Console(stderr=True)
    for name in wanted:
        is_cached = cache.manifest(name) is not None
        folder = cache.folder(name) if is_cached else hub[name]
        freed_bytes = folder_bytes(folder if is_cached else folder / "blobs")
        for loaded in [folder] if is_cached else sorted(folder.glob("snapshots/*")):
            freed_bytes += sum(size for _, size in packed_folders(loaded))
            remove_packed(loaded)
        if is_cached:
            cache.remove(name)
        else:
            shutil.rmtree(folder)
        console.print(f"removed {escape(harmless(name))} ({freed_bytes / 1e6:.0f} MB)", highlight=False)


models.command("cache", cls=PlainCommand)(show_cache)


def show_list(*, as_json: bool) -> None:
    cache = Cache()
    known = rows(cache)
    if as_json:
        values = {"cache": str(cache.root), "models": [dataclasses.asdict(row) for row in known]}
        typer.echo(json.dumps(values, indent=2))
        return
    console = Console()
    headings = ("name", "from", "parameters", "download", "disk", "here")
    shown = [
        (
            harmless(row.name),
            row.kind,
            short_count(row.parameters),
            short_bytes(row.download_bytes),
            short_bytes(row.disk_bytes),
            "yes" if row.folder else "no",
        )
        for row in known
    ]
    widths = [max(map(len, column)) for column in zip(headings, *shown, strict=True)]
    if sum(widths) + 2 * len(widths) <= console.width:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in headings:
            table.add_column(heading, no_wrap=True, justify="right" if heading in headings[2:5] else "left")
        for cells in shown:
            table.add_row(*map(escape, cells))
        console.print(table, highlight=False)
    else:  # a table would lose words
        for cells in shown:
            words = (f"{heading} {cell}" for heading, cell in zip(headings[1:], cells[1:], strict=True) if cell)
            console.print(escape(f"{cells[0]}: {', '.join(words)}"), highlight=False, soft_wrap=True)
    console.print()
    for row in known:
        facts = [] if row.vocabulary is None else [f"{row.vocabulary:,} tokens", row.licence]
        line = f"{row.name}: {'; '.join([row.description, *facts])}"
        console.print(escape(harmless(line)), highlight=False, soft_wrap=True, style="dim")
    console.print(escape(harmless(f"\ncache: {cache.root}")), highlight=False, soft_wrap=True)


def rows(cache: Cache) -> list[ModelRow]:
    """Return the catalogue, then all other models in the cache, then those in the cache of the hub's client."""
    listed = [catalogue_row(entry, cache) for entry in CATALOGUE.values()]
    others = [name for name in cache.names() if name not in CATALOGUE]
    return [*listed, *(other_row(name, cache) for name in others), *hub_rows()]


def catalogue_row(entry: CatalogueEntry, cache: Cache) -> ModelRow:
    return ModelRow(
        name=entry.name,
        kind="registry",
        description=entry.description,
        parameters=entry.num_parameters,
        download_bytes=entry.download_bytes,
        disk_bytes=entry.folder_bytes,
        licence=entry.licence,
        vocabulary=entry.vocab_size,
        context=entry.context_length,
        folder=str(cache.folder(entry.name)) if entry_is_here(entry, cache) else None,
    )


def other_row(name: str, cache: Cache) -> ModelRow:
    folder = cache.folder(name)
    manifest = cache.manifest(name) or {}
    source = str(manifest.get("source", "a file"))
    made = "read from" if is_block_description(folder) else "converted from"
    return ModelRow(
        name=name,
        kind="GGUF" if source.lower().endswith(".gguf") else "cache",
        description=f"{made} {source}",
        disk_bytes=folder_bytes(folder),
        licence="as the file",
        folder=str(folder),
    )


def hub_rows() -> list[ModelRow]:
    folders = (path for path in sorted(hub_cache().glob("models--*")) if any(path.glob("snapshots/*/config.json")))
    return [
        ModelRow(
            name=folder.name.removeprefix("models--").replace("--", "/"),
            kind="hub",
            description="in the hub client's cache, which other programs share",
            disk_bytes=folder_bytes(folder / "blobs"),
            licence="see its page",
            folder=str(folder),
        )
        for folder in folders
    ]


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
