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


def is_on(switch: str, kept: str) -> bool:
    """Return the value of an environment variable, which 0 switches off."""
    value = os.environ.get(switch) or "1"
    if value not in ("0", "1"):
        raise ConfigurationError(f"{switch} is '{value}': set it to 0 to keep no {kept}, or to 1")
    return value == "1"


class Store:
    """Records by name. Safe for processes that write at once."""

    def __init__(self) -> None:
        self.folder = Cache().root / "blueprints"
        self.is_on = is_on(SWITCH, "records of starts")

    def get(self, name: str, made_for: Mapping[str, Any]) -> Any | None:
        """Return the content of that name, if it is undamaged and was made for exactly these facts."""
        place = self.folder / f"{name}{SUFFIX}"
        try:
            record = _parsed(place.read_bytes())
            if record["made_for"] == made_for:
                return record["content"]
            logger.info("'%s' was made for other facts: it will be replaced", place)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            logger.info("'%s' cannot be read (%s): it will be replaced", place, error)
        return None

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
        records = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may remove it
                records.append((path, path.stat()))
        return sorted(records, key=lambda entry: entry[1].st_mtime_ns, reverse=True)

    def facts(self, path: Path) -> Mapping[str, Any]:
        try:
            facts: Mapping[str, Any] = _parsed(path.read_bytes())["made_for"]
            return facts
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
    record = parse_json(text)
    if not isinstance(record, dict) or not {"made_for", "content"} <= record.keys():
        raise ValueError("it is not a record")
    return record


def digest_of(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()
