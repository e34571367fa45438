"""Checks of installed packages and clients for a model by name, before anything is fetched or converted."""

from __future__ import annotations

import os
from pathlib import Path

from draftree.core.files import expanded
from draftree.weights.cache import Cache
from draftree.weights.catalogue import CATALOGUE
from draftree.weights.clients import require_client
from draftree.weights.gguf_file import is_gguf, require_gguf
from draftree.weights.install import entry_is_here

__all__ = ["require_clients", "require_extras"]


def require_extras(name: str | os.PathLike[str]) -> None:
    """Raise for a model that cannot be converted because the extra `gguf` is not installed.

    Args:
        name: a model's name, as for `resolve_model`; unknown names are left to `resolve_model`.

    Raises:
        WeightsError: the package is not installed.
    """
    if isinstance(name, str) and name in CATALOGUE:
        entry = CATALOGUE[name]
        if entry.form == "gguf" and not entry_is_here(entry, Cache()):
            require_gguf()
        return
    path = expanded(Path(name))
    if path.is_file() and is_gguf(path):
        require_gguf()


def require_clients(name: str) -> None:
    """Raise for a model of the catalogue whose registry's client is not installed.

    Raises:
        WeightsError: the client cannot be run.
    """
    if name in CATALOGUE and not entry_is_here(CATALOGUE[name], Cache()):
        for package in CATALOGUE[name].packages:
            require_client(package)
