"""Manifest of a folder of training data: what the data are, and the list of shards with their checksums.

Version 1. A folder holds `manifest.json` and shards. A shard is a safetensors file of S texts and N rows:

| tensor | dtype | shape | content |
| --- | --- | --- | --- |
| `tokens` | int32 | (N,) | token of each row |
| `starts` | int64 | (S + 1,) | first row of each text, then N |
| `ends` | int32 | (S,) | last token of each text, which has no row: the target never reads it |
| `prompt_lengths` | int32 | (S,) | tokens of each prompt |
| `temperatures` | float32 | (S,) | temperature of each text |
| `seeds` | int64 | (S,) | seed of each text |
| `prompt_ids` | int64 | (S,) | index of its prompt among all prompts |
| `features` | model's | (N, A, H) | inputs of the layers `features`; index n of n layers: output of the last one |
| `last` | model's | (N, H) | output of the last layer before the final norm; teacher `hidden` only |
| `top_ids` | int32 | (N, K) | most likely next tokens, best first; teacher `top-k:K` only |
| `top_logits` | float16 | (N, K) | their logits less `lse`: log-probabilities at temperature 1 |
| `lse` | float32 | (N,) | logarithm of the sum of exponentials of all logits |

Row i of a text holds the states at its token i, from which token i + 1 is predicted. A text of n tokens has n - 1 rows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.core.files import MALFORMED, JsonError, read_json

FORMAT, VERSION = "draftree training data", 1
MANIFEST = "manifest.json"
TEMPORARY = ".part"
"""Suffix of files that are being written."""
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard.

    Attributes:
        file: name in the folder.
        sha256: checksum of the file.
        texts: number of texts.
        tokens: number of rows.
    """

    file: str
    sha256: str
    texts: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """A set of prompts.

    Attributes:
        name: "shipped", "packages" or the name of a file.
        count: number of prompts.
        sha256: checksum of the prompts.
        licence: licence of the prompts, as far as it is known.
    """

    name: str
    count: int
    sha256: str
    licence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that determines the texts and their states. A folder is continued with an equal recipe only.

    Attributes:
        target: name of the target.
        fingerprint: identity of its weights.
        dtype: dtype of the stored states: that of the target.
        quantization: quantization of its weights; None for none.
        exact: whether states do not depend on the batch, so that the same settings give the same bytes.
        features: captured layers, counted from 0; the number of layers is the output of the last one.
        num_layers: number of layers of the target.
        hidden: width of its states.
        vocab: width of its logits.
        teacher: "hidden", or "top-k:K".
        chat: whether prompts are messages of a chat.
        temperatures: temperatures that texts take in turn.
        max_tokens: maximum number of new tokens of a text.
        max_prompt_tokens: longer prompts are skipped.
        seed: seed of the order of prompts and of the seeds of texts.
        shard_bytes: size at which a shard is closed.
        prompts: the sets of prompts.
    """

    target: str
    fingerprint: str
    dtype: str
    quantization: str | None
    exact: bool
    features: tuple[int, ...]
    num_layers: int
    hidden: int
    vocab: int
    teacher: str
    chat: bool
    temperatures: tuple[float, ...]
    max_tokens: int
    max_prompt_tokens: int
    seed: int
    shard_bytes: int
    prompts: tuple[PromptSource, ...]

    @property
    def top_k(self) -> int | None:
        """Number of stored logits of each row; None for teacher `hidden`."""
        kind, _, count = self.teacher.partition(":")
        return int(count) if kind == "top-k" else None

    def difference(self, other: Recipe, names: Sequence[str] | None = None) -> str:
        """Return the first of some fields (None: all) that differs, with both values; empty if there is none."""
        for name in names or [entry.name for entry in fields(self)]:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name} is {_shown(ours)}, and was {_shown(theirs)}"
        return ""


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], PromptSource):
        return ", ".join(f"{source.name} ({source.count}, {source.sha256[:8]})" for source in value)
    return repr(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """State of a folder.

    Attributes:
        recipe: what the data are.
        next_prompt: number of prompts that are done or skipped, in the order of the recipe.
        skipped: number of skipped prompts by reason.
        complete: whether the last run reached its limit, or the end of the prompts.
        shards: the shards in order; the last one may be smaller than the others.
    """

    recipe: Recipe
    next_prompt: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    complete: bool = False
    shards: tuple[ShardEntry, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of rows of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_texts(self) -> int:
        """Number of texts of all shards."""
        return sum(shard.texts for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Write the manifest; the old one is replaced in one step."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_atomically(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder.

        Raises:
            ConfigurationError: there is none, or it is of another format or version.
        """
        path = folder / MANIFEST
        try:
            content = read_json(path)
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"'{folder}' holds no training data: '{MANIFEST}' is missing; make them with 'draftree train data'"
            ) from error
        except JsonError as error:
            raise ConfigurationError(f"'{path}' cannot be read: {error}") from error
        if content.get("format") != FORMAT:
            raise ConfigurationError(f"'{path}' is not the manifest of training data")
        if content.get("version") != VERSION:
            raise ConfigurationError(
                f"'{path}' has version {content.get('version')!r}, and this program reads version {VERSION}"
            )
        try:
            return _manifest_of(content)
        except MALFORMED as error:
            raise ConfigurationError(f"'{path}' is damaged: {error!r}") from error


def _manifest_of(content: Mapping[str, Any]) -> Manifest:
    recipe = dict(content["recipe"])
    recipe["prompts"] = tuple(PromptSource(**source) for source in recipe["prompts"])
    recipe["features"] = tuple(map(int, recipe["features"]))
    recipe["temperatures"] = tuple(map(float, recipe["temperatures"]))
    return Manifest(
        recipe=Recipe(**recipe),
        next_prompt=int(content["next_prompt"]),
        skipped=dict(content["skipped"]),
        complete=bool(content["complete"]),
        shards=tuple(ShardEntry(**shard) for shard in content["shards"]),
    )


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path in the same folder, flush the file to disk and rename it to `path`."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        write(temporary)
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sum_of(path: Path) -> str:
    """Return the SHA-256 checksum of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()
