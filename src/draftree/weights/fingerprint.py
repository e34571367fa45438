"""The sha256 of a large file, cached until the file changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from draftree.weights.cache import Cache
from draftree.weights.fetch import file_sha256
from draftree.weights.progress import Progress

__all__ = ["fingerprint"]

logger = logging.getLogger(__name__)


def fingerprint(path: Path, cache: Cache, *, progress: Progress) -> str:
    """Return the sha256 of the content; read again only if size, times or inode changed since the last read."""
    path = path.resolve()
    status = path.stat()
    seen = {"path": str(path), "num_bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    seen |= {"changed_ns": status.st_ctime_ns, "inode": status.st_ino}
    note = cache.root / "fingerprints" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.json"
    try:
        known = json.loads(note.read_text("utf-8"))
        if {key: known[key] for key in seen} == seen:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # A missing or damaged record only costs another read of the file.
    sha256 = file_sha256(path, on_bytes=lambda done: progress("check", done, status.st_size))
    fresh = note.with_suffix(f".{os.getpid()}.tmp")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(seen | {"sha256": sha256}), "utf-8")
        os.replace(fresh, note)
    except OSError as error:
        logger.info("the sum of '%s' is not cached: %s", path, error)
    return sha256
