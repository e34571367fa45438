"""On-disk records of first starts of models and tokenizers, which shorten later starts.

A record is valid for the files and versions that it was made for. An invalid one is ignored and overwritten
by the next start. A checksum detects damage. The store is optional: if the folder is not accessible, every
start is a first one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.weights.cache import Cache

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "DRAFTREE_BLUEPRINTS"
LIMIT_BYTES = 50_000_000
SUFFIX, PART = ".json", ".part"
DEAD_SECONDS = 3600
"""Age at which a part counts as left by a dead process."""


class Store:
    """Records by name. Safe for concurrent writers."""

    def __init__(self) -> None:
        self.folder = Cache().root / "blueprints"
        self.limit_bytes = _limit_bytes()

    @property
    def is_on(self) -> bool:
        """Whether records are kept."""
        return self.limit_bytes > 0

    def get(self, name: str, made_for: Mapping[str, Any]) -> Any | None:
        """Return the content of that name, if it is undamaged and was made for exactly these facts."""
        place = self.folder / f"{name}{SUFFIX}"
        try:
            found = _parsed(place.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.info("'%s' cannot be read (%s): it will be replaced", place, error)
            return None
        if found["made_for"] != made_for:
            logger.info("'%s' was made for other facts: it will be replaced", place)
            return None
        with contextlib.suppress(OSError):
            os.utime(place)  # the least recently used are evicted first
        return found["content"]

    def put(self, name: str, made_for: Mapping[str, Any], content: Any) -> None:
        """Store JSON-serializable content, if possible."""
        text = json.dumps({"made_for": made_for, "content": content}, separators=(",", ":")).encode()
        whole = hashlib.sha256(text).hexdigest().encode() + b"\n" + text
        if len(whole) > self.limit_bytes:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=PART, delete=False) as part:
                try:
                    part.write(whole)
                    part.flush()
                    Path(part.name).replace(self.folder / f"{name}{SUFFIX}")
                except OSError:
                    Path(part.name).unlink(missing_ok=True)
                    raise
            self._shrink()
        except OSError as error:
            logger.info("the record of the first start is not stored in '%s': %s", self.folder, error)

    def entries(self) -> list[tuple[Path, os.stat_result]]:
        """Return all records and their status, the most recently used first."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may remove it
                found.append((path, path.stat()))
        return sorted(found, key=lambda entry: entry[1].st_mtime_ns, reverse=True)

    def facts(self, path: Path) -> Mapping[str, Any]:
        """Return the facts that a record was made for; empty if it is unreadable."""
        try:
            found: Mapping[str, Any] = _parsed(path.read_bytes())["made_for"]
            return found
        except (OSError, ValueError):
            return {}

    def clear(self) -> int:
        """Remove all records; returns their number."""
        entries = self.entries()
        for path, _ in entries:
            path.unlink(missing_ok=True)
        return len(entries)

    def _shrink(self) -> None:
        total = 0
        for path, status in self.entries():
            total += status.st_size
            if total > self.limit_bytes:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(f"*{PART}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > DEAD_SECONDS:
                    path.unlink()


def _limit_bytes() -> int:
    given = os.environ.get(LIMIT_VARIABLE)
    if not given:
        return LIMIT_BYTES
    if not given.isdecimal():
        raise ConfigurationError(
            f"{LIMIT_VARIABLE} is '{given}': give a number of bytes, such as {LIMIT_BYTES}, or 0 to turn the store off"
        )
    return int(given)


def _parsed(whole: bytes) -> dict[str, Any]:
    digest, _, text = whole.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError("it is damaged")
    found = json.loads(text)
    if not isinstance(found, dict) or not {"made_for", "content"} <= found.keys():
        raise ValueError("it is not a record")
    return found


def digest_of(files: Iterable[Path]) -> str:
    """Return a hash of the contents of files."""
    found = hashlib.sha256()
    for path in files:
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
