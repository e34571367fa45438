"""Records of first starts, of models and of tokenizers, kept on disk for later starts.

A record belongs to the files and versions that it was made for. One that does not match is ignored, and the next start
overwrites it, so that there is one record for each folder and kind of weights. A checksum detects damage. Records are
optional: if the folder cannot be written or read, every start is a first one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.core.files import MALFORMED, parse_json, write_whole
from draftree.weights.cache import Cache

logger = logging.getLogger(__name__)

SWITCH = "DRAFTREE_BLUEPRINTS"
SUFFIX, PART = ".json", ".part"


class Store:
    """Records by name. Safe for processes that write at once."""

    def __init__(self) -> None:
        self.folder = Cache().root / "blueprints"
        given = os.environ.get(SWITCH) or "1"
        if given not in ("0", "1"):
            raise ConfigurationError(f"{SWITCH} is '{given}': set it to 0 to keep no records of starts, or to 1")
        self.is_on = given == "1"

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
        return found["content"]

    def put(self, name: str, made_for: Mapping[str, Any], content: Any) -> None:
        """Keep content that JSON can represent; log it if the folder cannot be written."""
        text = json.dumps({"made_for": made_for, "content": content}, separators=(",", ":")).encode()
        whole = hashlib.sha256(text).hexdigest().encode() + b"\n" + text
        try:
            write_whole(self.folder / f"{name}{SUFFIX}", whole)
        except OSError as error:
            logger.info("the record of the first start is not stored in '%s': %s", self.folder, error)

    def entries(self) -> list[tuple[Path, os.stat_result]]:
        """Return all records and their status, the newest first."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may remove it
                found.append((path, path.stat()))
        return sorted(found, key=lambda entry: entry[1].st_mtime_ns, reverse=True)

    def facts(self, path: Path) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = _parsed(path.read_bytes())["made_for"]
            return found
        except (OSError, *MALFORMED):
            return {}

    def clear(self) -> int:
        entries = self.entries()
        for path in (*(path for path, _ in entries), *self.folder.glob(f"*{PART}")):
            path.unlink(missing_ok=True)
        return len(entries)


def _parsed(whole: bytes) -> dict[str, Any]:
    digest, _, text = whole.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError("it is damaged")
    found = parse_json(text)
    if not isinstance(found, dict) or not {"made_for", "content"} <= found.keys():
        raise ValueError("it is not a record")
    return found


def digest_of(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
