"""Results of first starts about models and tokenizers, on disk, so that the next ones are short.

A record belongs to what it was made for: files, versions. One that does not fit is as good as none, and is written over
by the next start. A checksum finds damage. Nothing here is needed: where the folder cannot be written or read, every
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
"""A part that is older was left by a process that is gone."""


class Store:
    """Records by name. Safe for processes that write at once."""

    def __init__(self) -> None:
        self.folder = Cache().root / "blueprints"
        self.limit_bytes = _limit_bytes()

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self.limit_bytes > 0

    def get(self, name: str, made_for: Mapping[str, Any]) -> Any | None:
        """The content of that name, if it is whole and was made for just this."""
        place = self.folder / f"{name}{SUFFIX}"
        try:
            found = _parsed(place.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.info("'%s' cannot be read (%s): it is made anew", place, error)
            return None
        if found["made_for"] != made_for:
            logger.info("'%s' was made for something else: it is made anew", place)
            return None
        with contextlib.suppress(OSError):
            os.utime(place)  # the least recently used go first
        return found["content"]

    def put(self, name: str, made_for: Mapping[str, Any], content: Any) -> None:
        """Keep what JSON can say, if that can be."""
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
            logger.info("results of the first start are not kept in '%s': %s", self.folder, error)

    def entries(self) -> list[tuple[Path, os.stat_result]]:
        """All records and their status, the most recently used first."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may take it away
                found.append((path, path.stat()))
        return sorted(found, key=lambda entry: entry[1].st_mtime_ns, reverse=True)

    def facts(self, path: Path) -> Mapping[str, Any]:
        """What a record was made for; nothing if it cannot be read."""
        try:
            found: Mapping[str, Any] = _parsed(path.read_bytes())["made_for"]
            return found
        except (OSError, ValueError):
            return {}

    def clear(self) -> int:
        """Remove all records; how many there were."""
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
            f"{LIMIT_VARIABLE} is '{given}': give a number of bytes, such as {LIMIT_BYTES}, or 0 to keep nothing"
        )
    return int(given)


def _parsed(whole: bytes) -> dict[str, Any]:
    digest, _, text = whole.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError("it is damaged")
    found = json.loads(text)
    if not isinstance(found, dict) or not {"made_for", "content"} <= found.keys():
        raise ValueError("it is something else")
    return found


def digest_of(files: Iterable[Path]) -> str:
    """Of the contents of files."""
    found = hashlib.sha256()
    for path in files:
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
