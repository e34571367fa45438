"""Packed weights that the cache keeps for later starts, which then read them instead of packing again.

A folder of packed weights is as large as the weights in memory. It belongs to the files and versions that it was made
for; the start of a model whose files or versions changed replaces it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.loading.choices import QUANTIZATIONS
from draftree.loading.warm_start.native_start import start_name
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.library import library
from draftree.models.native.library_files import PACKING, working_folder
from draftree.models.native.lowering import DTYPES, PACKED_AS
from draftree.models.native.model import NativeModel
from draftree.models.native.streaming.model import resident_model
from draftree.models.native.streaming.store import add_facts, open_store, publish, write_store
from draftree.models.native.weights import Weights
from draftree.weights.cache import Cache

__all__ = ["SWITCH", "PackedCopy", "copy_name", "keeps_packed", "packed_folders", "place_of", "remove_packed"]

logger = logging.getLogger(__name__)

FOLDER = "packed"
"""Folder of packed weights in the cache."""
SWITCH = "DRAFTREE_PACKED"
"""Environment variable: 0 keeps no packed weights."""


def keeps_packed() -> bool:
    """Return whether packed weights are kept in the cache.

    Raises:
        ConfigurationError: `DRAFTREE_PACKED` is neither 0 nor 1.
    """
    given = os.environ.get(SWITCH) or "1"
    if given not in ("0", "1"):
        raise ConfigurationError(f"{SWITCH} is '{given}': set it to 0 to keep no packed weights, or to 1")
    return given == "1"


def copy_name(folder: Path, place: str, kind: str) -> str:
    """Return the name of a folder of packed weights.

    Args:
        folder: folder of the model.
        place: hash that distinguishes it from other folders of the same name.
        kind: name of the dtype of keys and values.
    """
    return f"{folder.name}-{place[:12]}-{kind}"


def place_of(folder: Path) -> str:
    """Return the hash of a folder's path."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()


def packed_folders(model: Path | None = None) -> list[tuple[Path, int]]:
    """Return the folders of packed weights in the cache and their sizes in bytes, by name.

    Args:
        model: folder of the model whose packed weights are returned; None for those of all models.
    """
    names = None if model is None else _names_of(model)
    found = []
    for folder in sorted((Cache().root / FOLDER).glob("[!.]*/")):
        if names is None or folder.name in names:
            found.append((folder, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())))
    return found


def remove_packed(model: Path | None = None) -> int:
    """Remove folders of packed weights, `model` as for `packed_folders`; return how many there were."""
    removed = packed_folders(model)
    for folder, _ in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return len(removed)


def _names_of(model: Path) -> set[str]:
    identity = str((Cache().manifest(model.name) or {}).get("sha256", ""))  # of a GGUF file
    copies = {copy_name(model, place, kind) for place in (place_of(model), identity) for kind in DTYPES}
    return copies | {start_name(model, kind, packing) for kind in PACKED_AS for packing in (None, *QUANTIZATIONS)}


class PackedCopy:
    """Packed weights of one model in the cache.

    Args:
        name: name of the folder.
        facts: all facts that the weights depend on, which JSON can represent.
        quantization: name of the kind of weights.
    """

    def __init__(self, name: str, facts: Mapping[str, Any], *, quantization: str) -> None:
        self._place = Cache().root / FOLDER / name
        self._facts, self._quantization = dict(facts), quantization
        self._is_on = keeps_packed()
        self._is_new = False

    def load(self, blueprint: Blueprint) -> NativeModel | None:
        """Return the model if its packed weights are complete and were made for these facts; else None."""
        if not (self._is_on and self._place.exists()):
            return None
        try:
            store = open_store(self._place)
            if store.facts != self._facts:
                return None
            return resident_model(blueprint, store, quantization=self._quantization)
        except (ModelLoadError, KeyError, TypeError) as error:
            logger.info("'%s' is not usable: %s", self._place, error)
            return None

    def build(self, blueprint: Blueprint, weights: Weights) -> NativeModel:
        """Pack weights into the cache, or into memory if the cache cannot be written; `complete` makes them valid.

        Raises:
            NativeUnavailableError: the native kernels are unavailable.
        """
        if self._is_on:
            try:
                self._pack(blueprint, weights)
                self._is_new = True
                return resident_model(blueprint, open_store(self._place), quantization=self._quantization)
            except (ModelLoadError, OSError) as error:
                logger.warning("packed weights are not kept, so that every start packs them again: %s", error)
        return NativeModel(blueprint, weights, quantization=self._quantization)

    def complete(self) -> None:
        """Let later starts use what `build` packed, after its logits were compared."""
        if self._is_new:
            add_facts(open_store(self._place), self._facts)

    def _pack(self, blueprint: Blueprint, weights: Weights) -> None:
        with (
            Cache().locked(f"{FOLDER}-{self._place.name}"),
            working_folder(self._place.parent, PACKING) as work,
        ):
            fresh = work / "fresh"
            fresh.mkdir()
            logger.info("packing weights to '%s'", self._place)
            write_store(fresh, library(), blueprint, weights, quantization=self._quantization)
            publish(fresh, self._place)
