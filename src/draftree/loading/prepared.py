"""What a model needs on this machine before it is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from draftree.core.files import expanded
from draftree.loading.resolve import resolve_model
from draftree.weights.block_kinds import other_kinds
from draftree.weights.cache import Cache
from draftree.weights.catalogue import CATALOGUE
from draftree.weights.gguf_file import is_gguf, read_gguf, require_gguf
from draftree.weights.progress import Progress, silent

__all__ = ["gguf_path", "is_block_file", "prepared_folder"]


def gguf_path(name: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file that a model's name refers to; None for other models."""
    path = expanded(os.fspath(name)) if os.fspath(name).strip() and name not in CATALOGUE else None
    return path if path is not None and path.is_file() and is_gguf(path) else None


def is_block_file(name: str | os.PathLike[str]) -> bool:
    """Return whether a model's name is a GGUF file all of whose matrices have blocks that passes in C support.

    Raises:
        ModelLoadError: the file is damaged.
        WeightsError: the `gguf` package is missing.
    """
    path = gguf_path(name)
    if path is None:
        return False
    require_gguf()
    return not other_kinds(read_gguf(path))


def prepared_folder(name: str, *, fetch: bool = True, convert: bool = True, progress: Progress = silent) -> Path:
    """Return the folder with a model's configuration and tokenizer, so that loading it fetches nothing.

    A GGUF file that runs on its own blocks is described, not converted. Arguments and errors as for `resolve_model`.
    """
    if is_block_file(name):
        from draftree.weights.gguf_blocks import describe_blocks  # it imports torch

        return describe_blocks(expanded(name), Cache(), progress=progress)[0]
    return resolve_model(name, fetch=fetch, convert=convert, progress=progress)
