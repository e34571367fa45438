"""Measurements of `draftree tune` as lines of a file, so that an interrupted run continues."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.core.json_files import MALFORMED, parse_json
from draftree.tune.candidates import Candidate
from draftree.tune.contest import Cell, Sample
from draftree.weights.cache import Cache

__all__ = ["Journal", "forget_journals"]

logger = logging.getLogger(__name__)


class Journal:
    """The file of one model, one set of prompts and settings, and one machine.

    Args:
        fingerprint: identity of the model's weights.
        facts: everything that makes measurements comparable.
    """

    def __init__(self, fingerprint: str, facts: Mapping[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
        self.path = journal_folder() / f"{fingerprint}-{key}.jsonl"

    def read(self) -> dict[tuple[int, str], Sample]:
        """Return the measurements by cell and candidate; a last line that was not completed is left out."""
        found: dict[tuple[int, str], Sample] = {}
        try:
            lines = self.path.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return found
        for line in lines:
            try:
                values = parse_json(line)
                place = (values.pop("cell"), values.pop("candidate"))
                found[place] = Sample(**values)
            except MALFORMED:
                logger.info("%s: a line was not completed, and is left out", self.path)
        return found

    def add(self, cell: Cell, candidate: Candidate, sample: Sample) -> None:
        """Append a measurement.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        values = {"cell": cell.number, "candidate": candidate.name, **dataclasses.asdict(sample)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(values) + "\n")
        except OSError as error:
            raise ConfigurationError(
                f"'{self.path}' cannot be written ({error.strerror}): set DRAFTREE_CACHE to a writable folder"
            ) from error

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


def journal_folder() -> Path:
    """Return the folder of journals."""
    return Cache().root / "tuned"


def forget_journals(fingerprint: str) -> int:
    """Remove the journals of a model; returns their number."""
    found = list(journal_folder().glob(f"{fingerprint}-*.jsonl"))
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)
