"""Installation of a model in the cache as a plain folder: fetch, check, convert, publish."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from draftree.core.errors import ModelLoadError, ModelNotFoundError
from draftree.weights.cache import (
    SUMS,
    Cache,
    Progress,
    are_pickled,
    file_sha256,
    fingerprint,
    keep_sums,
    known_sums,
    noted_sums,
    recorded_fingerprint,
    require_intact,
    require_space,
    silent,
)
from draftree.weights.catalogue import CatalogueEntry
from draftree.weights.convert_gguf import GGUF_CONVERTER, convert_gguf
from draftree.weights.convert_llama2c import LLAMA2C_CONVERTER, convert_llama2c
from draftree.weights.convert_whisper import WHISPER_CONVERTER, convert_whisper
from draftree.weights.download import fetch_source
from draftree.weights.folders import check_model_folder, read_settings
from draftree.weights.gguf_file import GgufFile, other_kinds, require_gguf

logger = logging.getLogger(__name__)

CONVERTERS = {"gguf": "gguf-1", "llama2c": LLAMA2C_CONVERTER, "whisper": WHISPER_CONVERTER}
"""Version of the conversion of each form. The catalogue's files convert alike in `gguf-1` and `gguf-2`, except that the
base model gemma3-270m also ends texts at the end of a turn."""
BLOCK_FACTS = "gguf.json"  # file of the description of a GGUF file: settings, and the GGUF tensor of every parameter
TOKENIZER_BYTES = 48_000_000  # disk space for the tokenizer files and settings of the largest known vocabularies


def entry_is_here(entry: CatalogueEntry, cache: Cache) -> bool:
    return cache.holds(entry.name, origin(entry))


def install_entry(entry: CatalogueEntry, cache: Cache, *, fetch: bool = True, progress: Progress = silent) -> Path:
    made_from = origin(entry)
    folder = cache.folder(entry.name)
    if is_whole(folder, cache, made_from):
        return folder
    if not fetch:
        raise ModelNotFoundError(
            f"the model '{entry.name}' is not on this machine: run 'draftree models get {entry.name}' "
            f"({entry.download_bytes / 1e6:.0f} MB to download)"
        )
    with cache.locked(entry.name):
        if is_whole(folder, cache, made_from, warns=True):
            return folder
        if entry.form == "gguf":
            require_gguf()
        require_space(entry.name, cache.work, entry.working_bytes)
        logger.info("fetching '%s': %.0f MB", entry.name, entry.download_bytes / 1e6)
        with cache.scratch(entry.name) as scratch:
            source = fetch_source(entry, scratch, progress=progress)
            with cache.publish(entry.name, made_from | {"licence": entry.licence}) as fresh:
                if entry.form == "gguf":
                    convert_gguf(source, fresh, dtype=entry.dtype, progress=progress)
                elif entry.form == "llama2c":
                    convert_llama2c(source, fresh, progress=progress)
                else:
                    convert_whisper(source, fresh, progress=progress)
                check_model_folder(fresh)
    return folder


def gguf_folder_name(path: Path, sha256: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem)[:60].strip("-.")
    return f"gguf-{stem}-{sha256[:12]}"


def install_gguf(
    path: Path, cache: Cache, *, convert: bool = True, reason: str = "", progress: Progress = silent
) -> Path:
    """Return the folder made from a GGUF file, converted once with a warning that has the `reason`."""
    require_gguf()
    file = GgufFile(path)
    sha256 = fingerprint(path, cache, progress=progress)
    name = gguf_folder_name(path, sha256)
    folder = cache.folder(name)
    made_from = {"sha256": sha256, "converter": GGUF_CONVERTER, "dtype": file.natural_dtype}
    if is_whole(folder, cache, made_from):
        return folder
    if not convert:
        raise ModelNotFoundError(
            f"'{path}' has no folder yet, because {why_converted(file)}: run 'draftree models get {path}' to convert it"
        )
    with cache.locked(name):
        if is_whole(folder, cache, made_from, warns=True):
            return folder
        logger.warning(
            "'%s' is converted once to a folder in %s, %.1f MB in the cache: %s",
            path,
            file.natural_dtype,
            file.unpacked_bytes / 1e6,
            reason or why_converted(file),
        )
        require_space(name, cache.work, file.unpacked_bytes + TOKENIZER_BYTES)
        with cache.publish(name, {"source": path.name} | made_from) as fresh:
            convert_gguf(path, fresh, dtype=file.natural_dtype, progress=progress)
            check_model_folder(fresh)
    return folder


def block_folder_name(path: Path, sha256: str) -> str:
    return f"{gguf_folder_name(path, sha256)}-blocks"


def is_block_description(folder: Path) -> bool:
    """Return whether a folder of the cache describes a GGUF file, whose weights are elsewhere."""
    return (folder / BLOCK_FACTS).is_file()


def check_gguf(path: Path, cache: Cache) -> bool:
    """Compare a GGUF file and folders made from it with their checksums; returns whether the file had one."""
    require_gguf()
    GgufFile(path)
    known = recorded_fingerprint(path, cache)
    sha256 = known or fingerprint(path, cache, progress=silent)
    if known and file_sha256(path, on_bytes=lambda _: None) != known:
        raise ModelLoadError(f"'{path}' is damaged: its content differs from the recorded one; get the file again")
    for name in (gguf_folder_name(path, sha256), block_folder_name(path, sha256)):
        if cache.manifest(name) is not None:
            check_sums(cache.folder(name), cache, again=True)
    return known is not None


def why_converted(file: GgufFile) -> str:
    """Return why a file is converted if no option is the reason."""
    kinds = other_kinds(file)
    return f"native kernels do not read matrices of kind {' and '.join(kinds)}" if kinds else "plain weights are needed"


def origin(entry: CatalogueEntry) -> dict[str, object]:
    return {
        "source": [f"{package.registry}:{package.name}=={package.version}" for package in entry.packages],
        "sha256": entry.sha256,
        "converter": CONVERTERS[entry.form],
        "dtype": entry.dtype,
    }


def check_sums(folder: Path, cache: Cache, *, again: bool = False) -> None:
    """Compare a folder, in the cache or elsewhere, with its recorded checksums."""
    manifest = manifest_of(folder, cache)
    stored = None if manifest is None else known_sums(manifest.get(SUMS))
    if manifest is not None and not stored:
        # installed before sums were recorded: the present content is recorded as good
        for path in folder.glob("*.json"):
            read_settings(path)
        keep_sums(folder, cache.root)
        stored = noted_sums(folder, cache.root)
    require_intact(folder, cache.root, stored or None, again=again or are_pickled(folder))


def manifest_of(folder: Path, cache: Cache) -> dict[str, object] | None:
    is_ours = folder.resolve() == cache.folder(folder.name).resolve()
    return cache.manifest(folder.name) if is_ours else None


def has_sums(folder: Path, cache: Cache) -> bool:
    manifest = manifest_of(folder, cache)
    return bool((manifest and known_sums(manifest.get(SUMS))) or noted_sums(folder, cache.root))


def is_whole(folder: Path, cache: Cache, made_from: Mapping[str, object], *, warns: bool = False) -> bool:
    """Return whether a folder of the cache exists undamaged; False makes the caller install it again."""
    if not cache.holds(folder.name, made_from):
        return False
    try:
        check_model_folder(folder)
        check_sums(folder, cache)
    except ModelLoadError as error:
        if warns:
            logger.warning("installing '%s' again: %s", folder.name, error)
        return False
    return True
