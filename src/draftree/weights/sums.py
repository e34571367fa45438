"""Checksums of a model's files: detect damage, and never record damaged files as good.

Folders of the cache have the sums of their files in their manifest. For other folders a record in the cache holds them
from the first start on. A file is read again only if its size or modification time differs from the recorded one, or
after the model computed something else than before (`distrust`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftree.core.errors import ModelLoadError
from draftree.core.files import JsonError, get_again, read_json

__all__ = [
    "WEIGHT_FILES",
    "are_pickled",
    "distrust",
    "is_distrusted",
    "keep_sums",
    "known_sums",
    "noted_sums",
    "require_intact",
    "sums_of",
]

logger = logging.getLogger(__name__)

WEIGHT_FILES = ("*.safetensors", "*.bin")
PATTERNS = ("*.json", *WEIGHT_FILES, "*.jinja", "*.model", "*.tiktoken", "*.txt")
MANIFEST_NAMES = frozenset({"draftree.json"})

Sum = tuple[int, int, str]
"""Bytes, modification time in nanoseconds, sha256."""


def are_pickled(folder: Path) -> bool:
    """Return whether the weights of a folder are pickled: no record of a start then notices that they changed."""
    return not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin"))


def sums_of(folder: Path) -> dict[str, Sum]:
    """Return the sums of all files of a model, by name."""
    names = {path.name for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()} - MANIFEST_NAMES
    return {name: _sum(folder / name) for name in sorted(names)}


def known_sums(found: Any) -> dict[str, Sum]:
    """Return the valid sums in a manifest or a record; invalid entries are left out."""
    entries = found.items() if isinstance(found, dict) else ()
    kinds = (int, int, str)
    return {
        name: (entry[0], entry[1], entry[2])
        for name, entry in entries
        if isinstance(entry, list) and len(entry) == 3 and all(map(isinstance, entry, kinds))
    }


def keep_sums(folder: Path, root: Path) -> None:
    """Record the current sums of a folder; an existing record is kept."""
    if not noted_sums(folder, root):
        _write(folder, root, {"files": sums_of(folder)})


def noted_sums(folder: Path, root: Path) -> dict[str, Sum]:
    """Return the recorded sums of a folder; empty if there are none."""
    return known_sums(_note(folder, root).get("files"))


def distrust(folder: Path, root: Path) -> None:
    """Make the next check read all files, whatever their modification times, until they are found intact."""
    _write(folder, root, _note(folder, root) | {"distrusted": True})


def is_distrusted(folder: Path, root: Path) -> bool:
    """Return whether all files must be read again."""
    return bool(_note(folder, root).get("distrusted"))


def require_intact(folder: Path, root: Path, stored: Mapping[str, Sum] | None = None, *, again: bool = False) -> None:
    """Compare a folder with its sums; files that are unchanged since the last comparison are not read.

    Args:
        folder: a model folder.
        root: root of the cache, which holds the records.
        stored: sums from a manifest, which are binding whatever the modification times; None for other folders, whose
            files may be replaced.
        again: read every file.

    Raises:
        ModelLoadError: a file is damaged.
    """
    note = _note(folder, root)
    noted = known_sums(note.get("files"))
    doubted = again or bool(note.get("distrusted"))
    found: dict[str, Sum] = {}
    for name, entry in (noted if stored is None else stored).items():
        path, known = folder / name, noted.get(name)
        if stored is None and not path.is_file():
            continue  # the folder's owner removed it
        now = _status(path)
        if not doubted and now in (entry[:2], known[:2] if known else None):
            found[name] = (*now, entry[2])
            continue
        found[name] = _sum(path)
        was_written = stored is None and now != entry[:2]
        if found[name][2] != entry[2] and not was_written:
            distrust(folder, root)
            raise ModelLoadError(f"'{path}' is damaged: its content differs from the stored one; {get_again(folder)}")
    if doubted or found != noted:
        _write(folder, root, {"files": found})


def _sum(path: Path) -> Sum:
    with path.open("rb") as stream:
        status = os.fstat(stream.fileno())
        return status.st_size, status.st_mtime_ns, hashlib.file_digest(stream, "sha256").hexdigest()


def _status(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise ModelLoadError(f"'{path}' is missing or unreadable; {get_again(path.parent)}") from error
    return status.st_size, status.st_mtime_ns


def _place(folder: Path, root: Path) -> Path:
    where = str(folder.resolve())
    return root / "sums" / f"{hashlib.sha256(os.fsencode(where)).hexdigest()[:16]}.json"


def _note(folder: Path, root: Path) -> dict[str, Any]:
    try:
        return read_json(_place(folder, root))
    except (FileNotFoundError, JsonError):
        return {}


def _write(folder: Path, root: Path, note: Mapping[str, Any]) -> None:
    place = _place(folder, root)
    fresh = place.with_suffix(f".{os.getpid()}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(note), "utf-8")
        os.replace(fresh, place)
    except OSError as error:
        logger.info("the sums of '%s' are not recorded: %s", folder, error)
        with contextlib.suppress(OSError):
            fresh.unlink()
