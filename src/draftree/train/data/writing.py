"""Writing of training data: texts are added in order, shards are closed at a size, and a stop at any time is safe.

Files are written under a temporary name and renamed; the manifest is replaced last. A folder therefore always holds the
state of its manifest, and other files in it are left over from an interrupted write. The last shard may be unfinished:
its name has the number of its texts, and it is read again when the folder is continued.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from draftree.core.errors import ConfigurationError
from draftree.core.files import PathLock
from draftree.train.data.manifest import MANIFEST, TEMPORARY, Manifest, Recipe, ShardEntry, sum_of, write_atomically
from draftree.train.data.reading import shard_tensors
from draftree.train.data.texts import Text, stacked, text_of

OWN_FILE = re.compile(r"shard-\d{5}(-first-\d+)?\.safetensors|manifest\.json")


class ShardWriter:
    """Writes texts to a folder, or continues a folder with an equal recipe.

    Args:
        folder: new or empty, or a folder of training data.
        recipe: what the data are.
        row_bytes: stored bytes per row.

    Raises:
        ConfigurationError: the folder holds something else, data of another recipe, or is written by another process.
    """

    def __init__(self, folder: Path, recipe: Recipe, *, row_bytes: int) -> None:
        self._folder = folder
        self._limit = max(1, recipe.shard_bytes // row_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = PathLock(folder)
        except BlockingIOError as error:
            raise ConfigurationError(f"another process writes data to '{folder}': wait until it ends") from error
        found = continued(folder, recipe)
        self.manifest = Manifest(recipe=recipe) if found is None else found
        if found is None:
            self.manifest.write(folder)
        self._done: tuple[Text | str, ...] = ()
        """Texts of the unfinished shard, and the reasons of prompts without a text. Changed in one assignment only, so
        that an interruption at any time leaves a consistent state."""
        self._remove_leftovers()
        self._closed = self.manifest
        """The folder without its unfinished shard."""
        self._reopen()

    @property
    def next_prompt(self) -> int:
        """Number of prompts that are done or skipped."""
        return self._closed.next_prompt + len(self._done)

    @property
    def skipped(self) -> dict[str, int]:
        """Number of skipped prompts by reason."""
        found = Counter(self._closed.skipped)
        found.update(entry for entry in self._done if isinstance(entry, str))
        return dict(sorted(found.items()))

    @property
    def num_tokens(self) -> int:
        """Number of rows, those of the unfinished shard included."""
        return self._closed.num_tokens + self._open_rows

    @property
    def num_texts(self) -> int:
        """Number of texts, those of the unfinished shard included."""
        return self._closed.num_texts + len(self._open)

    @property
    def _open(self) -> list[Text]:
        return [entry for entry in self._done if isinstance(entry, Text)]

    @property
    def _open_rows(self) -> int:
        return sum(text.num_rows for text in self._open)

    def add(self, text: Text) -> None:
        """Add the text of the next prompt; closes the shard if it is full."""
        self._done = (*self._done, text)
        if self._open_rows >= self._limit:
            self._close()

    def skip(self, reason: str) -> None:
        """Note that the next prompt has no text."""
        self._done = (*self._done, reason)

    def save(self, *, complete: bool = False) -> None:
        """Write what was added, so that the folder can be used and continued.

        Args:
            complete: whether the data are as large as they were meant to be.
        """
        if complete:
            self._close(complete=True)
        elif self.manifest.complete or self.manifest.next_prompt < self.next_prompt:
            self._store(self._unfinished_name())

    def close(self) -> None:
        """Let other processes write to the folder."""
        self._lock.release()

    def _unfinished_name(self) -> str:
        return f"shard-{len(self._closed.shards):05}-first-{len(self._open)}.safetensors"

    def _close(self, *, complete: bool = False) -> None:
        self._store(f"shard-{len(self._closed.shards):05}.safetensors", complete=complete)
        closed, self._done = self.manifest, ()
        self._closed = closed

    def _store(self, name: str, *, complete: bool = False) -> None:
        """Write the unfinished shard and a manifest with it."""
        shards = self._closed.shards
        if self._open:
            path, tensors = self._folder / name, stacked(self._open)
            write_atomically(path, lambda temporary: save_file(tensors, temporary))
            rows = tensors["tokens"].shape[0]
            shards = (*shards, ShardEntry(file=name, sha256=sum_of(path), texts=len(self._open), tokens=rows))
        found = replace(
            self._closed, shards=shards, next_prompt=self.next_prompt, skipped=self.skipped, complete=complete
        )
        found.write(self._folder)
        self.manifest = found
        self._remove_leftovers()

    def _reopen(self) -> None:
        """Take the texts of the last shard into memory again if it is not full."""
        if not self.manifest.shards or self.manifest.shards[-1].tokens >= self._limit:
            return
        last = self.manifest.shards[-1]
        tensors = shard_tensors(self._folder, last)
        # copies: the file is removed once it is written again
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        self._done = tuple(text_of(copies, index) for index in range(last.texts))
        self._closed = replace(
            self.manifest,
            shards=self.manifest.shards[:-1],
            next_prompt=self.manifest.next_prompt - last.texts,
            complete=False,
        )
        if last.file != self._unfinished_name():
            # the name of a closed shard is needed for the larger one
            self._store(self._unfinished_name())

    def _remove_leftovers(self) -> None:
        """Remove files of this format that the manifest does not name."""
        known = {MANIFEST, *(shard.file for shard in self.manifest.shards)}
        for path in self._folder.iterdir():
            own = OWN_FILE.fullmatch(path.name.removesuffix(TEMPORARY))
            if own is not None and path.name not in known:
                path.unlink()


def continued(folder: Path, recipe: Recipe) -> Manifest | None:
    """Return the manifest of a folder with data of this recipe; None if the folder is empty.

    Raises:
        ConfigurationError: the folder holds something else, or data of another recipe.
    """
    if not (folder / MANIFEST).exists():
        others = sorted(path.name for path in folder.iterdir() if not path.name.endswith(TEMPORARY))
        if others:
            raise ConfigurationError(f"'{folder}' holds other files ('{others[0]}'): choose an empty or a new folder")
        return None
    found = Manifest.read(folder)
    different = recipe.difference(found.recipe)
    if different:
        raise ConfigurationError(
            f"'{folder}' cannot be continued: {different}; repeat the options of the first run, or choose a new folder"
        )
    return found
