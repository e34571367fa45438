"""The command that restores a damaged model, as far as its folder records the origin."""

from __future__ import annotations

import re
from pathlib import Path

from draftree.core.json_files import MALFORMED, read_json

__all__ = ["MANIFEST", "MODELS", "WORK", "get_again"]

MANIFEST = "draftree.json"
"""Present in every folder of the cache; records the origin of the model."""
MODELS, WORK = "models", "work"
"""Folders of the cache: complete model folders; locks and unfinished model folders."""
HUB_SNAPSHOT = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]")


def get_again(folder: Path) -> str:
    """Return the last part of a message about a damaged model: the remedy."""
    if found := HUB_SNAPSHOT.search(f"{folder}/"):
        return f"run 'hf download {found[1]}/{found[2]} --force-download'"
    try:
        source = read_json(folder / MANIFEST)["source"]
    except (OSError, *MALFORMED):
        return "copy the model again from its origin"
    if not _is_in_cache(folder):
        return "it was copied from a cache of models: copy it again from there"
    if isinstance(source, list):
        return f"run 'draftree models get {folder.name}'"
    return f"run 'draftree models remove {folder.name}', then name '{source}' again"


def _is_in_cache(folder: Path) -> bool:
    """Return whether a folder of models is in a cache, which has a folder for unfinished work beside that of models."""
    models = folder.absolute().parent
    return models.name == MODELS and (models.parent / WORK).is_dir()
