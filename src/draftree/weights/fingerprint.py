"""The sha256 of a large file, cached until the file changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from draftree.core.files import MALFORMED, read_json
from draftree.weights.cache import Cache
from draftree.weights.fetch import file_sha256
from draftree.weights.progress import Progress

__all__ = ["fingerprint", "is_fingerprinted", "status_of"]

logger = logging.getLogger(__name__)


def fingerprint(path: Path, cache: Cache, *, progress: Progress) -> str:
    """Return the sha256 of the content; read again only if size, times or inode changed since the last read."""
    path = path.resolve()
    seen, note = status_of(path), _note(path, cache)
    if (known := _recorded(note, seen)) is not None:
        return known
    sha256 = file_sha256(path, on_bytes=lambda done: progress("check", done, seen["num_bytes"]))
    fresh = note.with_suffix(f".{os.getpid()}.tmp")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(seen | {"sha256": sha256}), "utf-8")
        os.replace(fresh, note)
    except OSError as error:
        logger.info("the sum of '%s' is not cached: %s", path, error)
    return sha256


def is_fingerprinted(path: Path, cache: Cache) -> bool:
    """Return whether the sha256 of the file is cached; `fingerprint` then does not read it."""
    path = path.resolve()
    return _recorded(_note(path, cache), status_of(path)) is not None


def status_of(path: Path) -> dict[str, Any]:
    """Return what changes when a file does: its resolved path, size, times and inode."""
    path = path.resolve()
    status = path.stat()
    return {
        "path": str(path),
        "num_bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }


def _note(path: Path, cache: Cache) -> Path:
    return cache.root / "fingerprints" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.json"


def _recorded(note: Path, seen: dict[str, Any]) -> str | None:
    try:
        known = read_json(note)
        return str(known["sha256"]) if {key: known[key] for key in seen} == seen else None
    except (OSError, *MALFORMED):
        return None  # a missing or damaged record only costs another read of the file
