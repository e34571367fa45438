"""What a first start found out about a model, on disk: the next start needs neither to read nor to check it anew.

That is its blueprint, where its weights lie in its own files, what the self-check found, and a digest of logits. The
weights themselves are not kept: packing them from their files takes as long as reading packed ones would.

A record belongs to files of certain sizes and times of change, to versions, and to a built library. One that does not
fit is as good as none, and is written over by the next start. Nothing here is needed: where the folder can not be
written or read, every start is a first one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.models.check import CheckResult
from draftree.models.native.blueprint import Blueprint, LayerBlueprint, LinearBlueprint
from draftree.models.native.rotary import Rope
from draftree.models.native.weights import StoredWeight
from draftree.models.weights.cache import Cache

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "DRAFTREE_BLUEPRINTS"
LIMIT_BYTES = 50_000_000
SUFFIX, PART = ".json", ".part"
DEAD_SECONDS = 3600
"""A part that is older was left by a process that is gone."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is kept of a model.

    Attributes:
        made_for: what it depends on.
        blueprint: how it is built.
        places: where its weights lie.
        check: what the self-check found.
        eos_ids: tokens that end a text.
        digest: of logits that it gave.
    """

    made_for: Mapping[str, Any]
    blueprint: Blueprint
    places: Mapping[str, StoredWeight]
    check: CheckResult
    eos_ids: tuple[int, ...]
    digest: str


class Store:
    """Records by the folder of the model, its dtype and its quantization. Safe for processes that write at once."""

    def __init__(self) -> None:
        self.folder = Cache().root / "blueprints"
        self.limit_bytes = _limit_bytes()

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self.limit_bytes > 0

    def get(self, name: str, made_for: Mapping[str, Any]) -> Record | None:
        """The record of that name, if it is whole and was made for just this."""
        place = self.folder / f"{name}{SUFFIX}"
        try:
            record = _parsed(place.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.info("'%s' can not be read (%s): it is made anew", place, error)
            return None
        if record.made_for != made_for:
            logger.info("'%s' was made for something else: it is made anew", place)
            return None
        with contextlib.suppress(OSError):
            os.utime(place)  # the least recently used go first
        return record

    def put(self, name: str, record: Record) -> None:
        """Keep a record, if that can be."""
        content = _written(record)
        if len(content) > self.limit_bytes:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=PART, delete=False) as part:
                try:
                    part.write(content)
                    part.flush()
                    Path(part.name).replace(self.folder / f"{name}{SUFFIX}")
                except OSError:
                    Path(part.name).unlink(missing_ok=True)
                    raise
            self._shrink()
        except OSError as error:
            logger.info("what was found out about a model is not kept in '%s': %s", self.folder, error)

    def entries(self) -> list[tuple[Path, os.stat_result]]:
        """All records and their status, the most recently used first."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may take it away
                found.append((path, path.stat()))
        return sorted(found, key=lambda entry: entry[1].st_mtime_ns, reverse=True)

    def facts(self, path: Path) -> Mapping[str, Any]:
        """What a record was made for; nothing if it can not be read."""
        try:
            return _parsed(path.read_bytes()).made_for
        except (OSError, ValueError, KeyError, TypeError):
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


def _written(record: Record) -> bytes:
    content = json.dumps(dataclasses.asdict(record), separators=(",", ":")).encode()
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def _parsed(content: bytes) -> Record:
    digest, _, text = content.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError("it is damaged")
    found = json.loads(text)
    return Record(
        made_for=found["made_for"],
        blueprint=_blueprint(found["blueprint"]),
        places={
            name: StoredWeight(**place | {"shape": tuple(place["shape"])}) for name, place in found["places"].items()
        },
        check=CheckResult(**found["check"]),
        eos_ids=tuple(found["eos_ids"]),
        digest=found["digest"],
    )


def _blueprint(found: dict[str, Any]) -> Blueprint:
    head = LinearBlueprint(**found["head"])
    ropes = tuple(Rope(tuple(rope["frequencies"]), rope["scaling"]) for rope in found["ropes"])
    layers = tuple(_layer(layer) for layer in found["layers"])
    return Blueprint(**found | {"head": head, "ropes": ropes, "layers": layers})


def _layer(found: dict[str, Any]) -> LayerBlueprint:
    many = {side: tuple(LinearBlueprint(**linear) for linear in found[side]) for side in ("qkv", "gate_up")}
    single = {side: LinearBlueprint(**found[side]) for side in ("output", "down")}
    return LayerBlueprint(**found | many | single)
