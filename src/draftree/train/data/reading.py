"""Reading of training data: memory-mapped shards, checked against the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.train.data.manifest import Manifest, Recipe, ShardEntry, sum_of
from draftree.train.data.texts import Text, text_of

OPEN_SHARDS = 64
"""Shards that are mapped at a time."""
UNSEEN_SHARE = 0.05


COMMON = ("fingerprint", "dtype", "quantization", "features", "num_layers", "hidden", "vocab", "teacher", "chat")
"""Parts of a recipe that folders which are read together share."""


@dataclass(frozen=True, slots=True)
class DataFolder:
    """One folder of training data that is read together with others.

    Attributes:
        path: the folder.
        manifest: its manifest.
        texts: numbers of its texts among those of all folders.
    """

    path: Path
    manifest: Manifest
    texts: range


@final
class TrainingData:
    """Texts of one or several folders of training data, as a sequence: folder by folder, in the order of the prompts.

    Args:
        folders: as written by 'draftree train data', of one target, with the same captured layers and teacher.
        verify: whether to compare the checksums of all shards first.

    Raises:
        ConfigurationError: no training data, a missing or damaged shard, another version of the format, the same folder
            twice, or folders that do not fit together.
    """

    def __init__(self, *folders: Path | str, verify: bool = True) -> None:
        if not folders:
            raise ConfigurationError("no folder of training data was given")
        self._places: list[tuple[DataFolder, int, int]] = []
        self.folders: list[DataFolder] = []
        for path in map(Path, folders):
            self._add(path, verify)
        self._tensors = lru_cache(OPEN_SHARDS)(shard_tensors)

    def _add(self, path: Path, verify: bool) -> None:
        manifest = Manifest.read(path)
        if any(path.resolve() == other.path.resolve() for other in self.folders):
            raise ConfigurationError(f"'{path}' is given twice: name each folder of training data once")
        for other in self.folders[:1]:
            difference = manifest.recipe.difference(other.manifest.recipe, COMMON)
            if difference:
                raise ConfigurationError(f"'{path}' does not fit '{other.path}': {difference} there")
        for shard in manifest.shards if verify else ():
            _verify(path, shard)
        first = len(self._places)
        folder = DataFolder(path, manifest, range(first, first + manifest.num_texts))
        self.folders.append(folder)
        self._places += [
            (folder, number, index) for number, shard in enumerate(manifest.shards) for index in range(shard.texts)
        ]

    @property
    def recipe(self) -> Recipe:
        """The recipe of the data: target, features, teacher and sampling of the first folder, prompts of all."""
        prompts = tuple(source for folder in self.folders for source in folder.manifest.recipe.prompts)
        return replace(self.folders[0].manifest.recipe, prompts=prompts)

    @property
    def num_tokens(self) -> int:
        """Number of rows of all texts."""
        return sum(folder.manifest.num_tokens for folder in self.folders)

    def _shard(self, folder: DataFolder, number: int) -> dict[str, Tensor]:
        return self._tensors(folder.path, folder.manifest.shards[number])

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Text:
        folder, number, place = self._places[index]
        return text_of(self._shard(folder, number), place)

    def __iter__(self) -> Iterator[Text]:
        return (self[index] for index in range(len(self)))

    def prompt_ids(self) -> list[int]:
        """Return the prompt of each text: its index among the prompts of its folder."""
        return [
            int(prompt)
            for folder in self.folders
            for number in range(len(folder.manifest.shards))
            for prompt in self._shard(folder, number)["prompt_ids"]
        ]

    def split(self, unseen_share: float = UNSEEN_SHARE) -> tuple[list[int], list[int]]:
        """Divide the texts by a hash of their prompt's id: the same prompt of the same sets is on the same side always.

        Args:
            unseen_share: share of the prompts that are not trained on, at least 0 and below 1.

        Returns:
            Indices of texts for training, and of unseen texts.

        Raises:
            ConfigurationError: a share out of range.
        """
        if not 0 <= unseen_share < 1:
            raise ConfigurationError(f"unseen_share is {unseen_share}: it must be at least 0 and below 1")
        sides: tuple[list[int], list[int]] = ([], [])
        for index, prompt in enumerate(self.prompt_ids()):
            sides[is_unseen(prompt, unseen_share)].append(index)
        return sides

    def counts(self, texts: Sequence[int] | None = None, *, answers_only: bool = True) -> Tensor:
        """Count tokens by id, for a draft vocabulary.

        Args:
            texts: indices of texts; None for all.
            answers_only: whether tokens of prompts are left out.

        Returns:
            Counts, shape (vocab,), int64.
        """
        found = np.zeros(self.recipe.vocab, dtype=np.int64)
        for index in range(len(self)) if texts is None else texts:
            text = self[index]
            own = text.tokens[text.prompt_length if answers_only else 0 :].numpy()
            found += np.bincount(own, minlength=self.recipe.vocab)
        return torch.from_numpy(found)


def is_unseen(prompt_id: int, share: float) -> bool:
    """Return whether texts of a prompt are held out from training, by a hash of its id."""
    digest = hashlib.blake2b(str(prompt_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def shard_tensors(folder: Path, shard: ShardEntry) -> dict[str, Tensor]:
    """Return the tensors of a shard, memory-mapped.

    Raises:
        ConfigurationError: the file is missing, or is not the shard of this entry.
    """
    path = folder / shard.file
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"'{path}' cannot be read: {error}") from error
    sizes = (found["starts"].shape[0] - 1, found["tokens"].shape[0]) if {"starts", "tokens"} <= set(found) else None
    if sizes != (shard.texts, shard.tokens):
        raise ConfigurationError(f"'{path}' is not the shard of its manifest: restore it, or make the data again")
    return found


def _verify(folder: Path, shard: ShardEntry) -> None:
    path = folder / shard.file
    try:
        found = sum_of(path)
    except OSError as error:
        raise ConfigurationError(f"'{path}' cannot be read: {error.strerror}") from error
    if found != shard.sha256:
        raise ConfigurationError(
            f"'{path}' is damaged: its SHA-256 checksum is {found[:12]}…, and the manifest has {shard.sha256[:12]}…"
        )
