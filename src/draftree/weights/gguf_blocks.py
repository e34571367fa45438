"""Weights of a GGUF file in its own blocks, by their names in the transformers model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.core.files import MALFORMED, get_again, read_json
from draftree.weights.cache import Cache, Progress, fingerprint
from draftree.weights.convert_gguf import GGUF_CONVERTER, GgufModel, save_description
from draftree.weights.gguf_families import JOINED
from draftree.weights.gguf_file import read_gguf
from draftree.weights.install import BLOCK_FACTS, block_folder_name


class BlockFile(GgufModel):
    def kind(self, name: str) -> str:
        """Return the kind of a parameter's blocks; for experts that of the largest tensor, else of all, joined."""
        parts = self.parts(name)
        if len(self.file.tensor(parts[0]).shape) == 3:
            return self.file.kind_of(max(parts, key=lambda part: self.file.tensor(part).num_bytes))
        return JOINED.join(dict.fromkeys(map(self.file.kind_of, parts)))

    def values(self, name: str) -> Tensor:
        return torch.from_numpy(self.read(name))

    def in_block_order(self, name: str) -> Tensor:
        """Return the values like `values`, with the heads in the order that the blocks have."""
        return torch.from_numpy(self.read_tiled(name))

    def rows(self, name: str) -> Tensor:
        """Return the bytes of a matrix, shape (rows, bytes of a row), uint8: a view of the file if it is one tensor."""
        rows = [self.file.rows(part) for part in self.parts(name)]
        return torch.from_numpy(rows[0] if len(rows) == 1 else np.concatenate(rows))

    def expert(self, name: str, expert: int) -> tuple[tuple[str, Tensor], ...]:
        """Return kind and bytes of the matrices of one expert, as views of the file, shape (rows, bytes of a row)."""
        matrices = []
        for part in self.parts(name):
            count = self.file.tensor(part).shape[1]
            rows = self.file.rows(part)[expert * count : (expert + 1) * count]
            matrices.append((self.file.kind_of(part), torch.from_numpy(rows)))
        return tuple(matrices)

    def order(self, name: str) -> Tensor:
        numbers = np.arange(self.shape(name)[0], dtype=np.float32)[:, None]
        return torch.from_numpy(self.restored(name, numbers)[:, 0].astype(np.int64))

    def release(self, name: str) -> None:
        """Release the mapped pages of a parameter; later reads load them again."""
        for part in self.parts(name):
            self.file.release(part)


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
                model, _ = save_description(file, fresh, dtype="bfloat16")
                facts: dict[str, Any] = {"sha256": sha256, "settings": model.settings, "sources": model.sources}
                (fresh / BLOCK_FACTS).write_text(json.dumps(facts), "utf-8")
    try:
        facts = read_json(folder / BLOCK_FACTS)
        return folder, BlockFile(file, facts["settings"], facts["sources"])
    except (OSError, *MALFORMED) as error:
        raise ModelLoadError(f"'{folder / BLOCK_FACTS}' is damaged ({error!r}); {get_again(folder)}") from None
