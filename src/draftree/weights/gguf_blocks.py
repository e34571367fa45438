"""Weights of a GGUF file in its own blocks, by their names in the transformers model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import DraftreeError, ModelLoadError, panics_as_errors
from draftree.core.files import MALFORMED, get_again, read_json
from draftree.weights.cache import Cache, Progress, fingerprint
from draftree.weights.convert_gguf import (
    ARCHITECTURES,
    GGUF_CONVERTER,
    JOINED,
    Architecture,
    joined_shape,
    read_joined,
    save_description,
    tensor_sources,
)
from draftree.weights.gguf_file import GgufFile, read_gguf
from draftree.weights.install import BLOCK_FACTS, block_folder_name


class BlockFile:
    def __init__(
        self, file: GgufFile, architecture: Architecture, *, settings: dict[str, Any], sources: dict[str, str]
    ) -> None:
        self._file, self._architecture, self._settings = file, architecture, settings
        self.sources = sources

    def kind(self, name: str) -> str:
        parts = self.sources[name].split(JOINED)
        return self._file.kind_of(max(parts, key=lambda part: self._file.tensor(part).num_bytes))

    def shape(self, name: str) -> tuple[int, ...]:
        return joined_shape(self._file, self.sources[name])

    def values(self, name: str) -> Tensor:
        found = self._architecture.restore(name, read_joined(self._file, self.sources[name]), self._settings)
        return torch.from_numpy(np.require(found, requirements=["C", "W"]))

    def rows(self, name: str) -> Tensor:
        """Return the bytes of a matrix as a view of the file, shape (rows, bytes of a row), uint8."""
        return torch.from_numpy(self._file.rows(self.sources[name]))

    def expert(self, name: str, expert: int) -> tuple[tuple[str, Tensor], ...]:
        """Return kind and bytes of the matrices of one expert, as views of the file, shape (rows, bytes of a row)."""
        found = []
        for source in self.sources[name].split(JOINED):
            rows = self._file.tensor(source).shape[1]
            own = self._file.rows(source)[expert * rows : (expert + 1) * rows]
            found.append((self._file.kind_of(source), torch.from_numpy(own)))
        return tuple(found)

    def order(self, name: str) -> Tensor:
        count = self._file.tensor(self.sources[name]).shape[0]
        numbers = np.arange(count, dtype=np.float32)[:, None]
        found = self._architecture.restore(name, numbers, self._settings)
        return torch.from_numpy(found[:, 0].astype(np.int64))

    def release(self, name: str) -> None:
        """Release the mapped pages of a parameter; later reads load them again."""
        for source in self.sources[name].split(JOINED):
            self._file.release(source)


def describe_blocks(path: Path, cache: Cache, *, progress: Progress) -> tuple[Path, BlockFile]:
    """Return a folder with configuration and tokenizer of a GGUF file, without weights, and the file."""
    file = read_gguf(path)
    sha256 = fingerprint(path, cache, progress=progress)
    name = block_folder_name(path, sha256)
    made_from = {"sha256": sha256, "converter": GGUF_CONVERTER}
    folder = cache.folder(name)
    with cache.locked(name):
        if not cache.holds(name, made_from):
            with cache.publish(name, {"source": path.name} | made_from) as fresh:
                _describe(file, fresh, sha256)
    architecture = ARCHITECTURES[file.metadata["general.architecture"]]
    try:
        facts = read_json(folder / BLOCK_FACTS)
        return folder, BlockFile(file, architecture, settings=facts["settings"], sources=facts["sources"])
    except (OSError, *MALFORMED) as error:
        raise ModelLoadError(f"'{folder / BLOCK_FACTS}' is damaged ({error!r}); {get_again(folder)}") from None


def _describe(file: GgufFile, folder: Path, sha256: str) -> None:
    try:
        with panics_as_errors():
            _, settings, shapes = save_description(file, folder, dtype="bfloat16")
        sources = tensor_sources(file, shapes)
        (folder / BLOCK_FACTS).write_text(
            json.dumps({"sha256": sha256, "settings": settings, "sources": sources}), "utf-8"
        )
    except (DraftreeError, OSError):
        raise
    except Exception as error:
        # Damaged metadata can fail anywhere in the libraries that build a model from it.
        raise file.broken(f"its metadata do not describe a model ({error})") from error
