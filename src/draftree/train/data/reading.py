"""Reading of training data: memory-mapped shards, checked against the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
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


@final
class TrainingData:
    """Texts of a folder of training data, as a sequence in the order of the prompts.

    Args:
        folder: as written by 'draftree train data'.
        verify: whether to compare the checksums of all shards first.

    Raises:
        ConfigurationError: no training data, a missing or damaged shard, or another version of the format.
    """

    def __init__(self, folder: Path | str, *, verify: bool = True) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        for shard in self.manifest.shards if verify else ():
            _verify(self.folder, shard)
        self._places = [
            (number, index) for number, shard in enumerate(self.manifest.shards) for index in range(shard.texts)
        ]
        self._tensors = lru_cache(OPEN_SHARDS)(self._read)

    @property
    def recipe(self) -> Recipe:
        """What the data are: target, features, teacher, sampling."""
        return self.manifest.recipe

    @property
    def num_tokens(self) -> int:
        """Number of rows of all texts."""
        return self.manifest.num_tokens

    def _read(self, number: int) -> dict[str, Tensor]:
        return shard_tensors(self.folder, self.manifest.shards[number])

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Text:
        number, place = self._places[index]
        return text_of(self._tensors(number), place)

    def __iter__(self) -> Iterator[Text]:
        return (self[index] for index in range(len(self)))

    def prompt_ids(self) -> list[int]:
        """Return the prompt of each text."""
        return [int(i) for number in range(len(self.manifest.shards)) for i in self._tensors(number)["prompt_ids"]]

    def split(self, unseen_share: float = UNSEEN_SHARE) -> tuple[list[int], list[int]]:
        """Divide the texts by a hash of their prompt's id; the same prompt is on the same side in all folders.

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
