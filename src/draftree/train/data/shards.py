"""Training data on disk: a manifest, shards with checksums, and texts with their hidden states.

A writer adds texts in order and closes a shard at a size; a stop at any time is safe. A reader maps the shards and
checks them against the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.files import MALFORMED, JsonError, PathLock, read_json
from draftree.models.base import LanguageModel

# Manifest of a folder of training data: what the data are, and the list of shards with their checksums.
#
# Version 1. A folder holds `manifest.json` and shards. A shard is a safetensors file of S texts and N rows:
#
# tensor           dtype    shape      content
# tokens           int32    (N,)       token of each row
# starts           int64    (S + 1,)   first row of each text, then N
# ends             int32    (S,)       last token of each text, which has no row: the target never reads it
# prompt_lengths   int32    (S,)       tokens of each prompt
# temperatures     float32  (S,)       temperature of each text
# seeds            int64    (S,)       seed of each text
# prompt_ids       int64    (S,)       index of its prompt among all prompts
# features         model's  (N, A, H)  inputs of the layers `features`; index n of n layers: output of the last one
# last             model's  (N, H)     output of the last layer before the final norm; teacher `hidden` only
# top_ids          int32    (N, K)     most likely next tokens, best first; teacher `top-k:K` only
# top_logits       float16  (N, K)     their logits less `lse`: log-probabilities at temperature 1
# lse              float32  (N,)       logarithm of the sum of exponentials of all logits
#
# Row i of a text holds the states at its token i, from which token i + 1 is predicted. A text of n tokens has n - 1
# rows.

FORMAT, VERSION = "draftree training data", 1
MANIFEST = "manifest.json"
TEMPORARY = ".part"  # suffix of files that are being written


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """One shard with numbers of texts and of rows (`tokens`)."""

    file: str
    sha256: str
    texts: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """A set of prompts; its licence as far as it is known."""

    name: str
    count: int
    sha256: str
    licence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that determines the texts and their states. A folder is continued with an equal recipe only."""

    target: str
    fingerprint: str
    dtype: str  # dtype of the stored states: that of the target
    quantization: str | None
    exact: bool  # whether states do not depend on the batch, so that the same settings give the same bytes
    features: tuple[int, ...]  # captured layers, counted from 0; the number of layers is the output of the last one
    num_layers: int
    hidden: int
    vocab: int
    teacher: str
    chat: bool  # whether prompts are messages of a chat
    temperatures: tuple[float, ...]  # temperatures that texts take in turn
    max_tokens: int
    max_prompt_tokens: int
    seed: int  # seed of the order of prompts and of the seeds of texts
    shard_bytes: int
    prompts: tuple[PromptSource, ...]

    @property
    def top_k(self) -> int | None:
        """Number of stored logits of each row; None for teacher `hidden`."""
        return top_k_of(self.teacher, self.vocab)

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
    """State of a folder."""

    recipe: Recipe
    next_prompt: int = 0  # number of prompts that are done or skipped, in the order of the recipe
    skipped: Mapping[str, int] = field(default_factory=dict)  # number of skipped prompts by reason
    complete: bool = False  # whether the last run reached its limit, or the end of the prompts
    shards: tuple[ShardEntry, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of rows of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_texts(self) -> int:
        return sum(shard.texts for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Write the manifest; the old one is replaced in one step."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_atomically(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
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
            recipe = dict(content["recipe"])
            recipe["prompts"] = tuple(PromptSource(**source) for source in recipe["prompts"])
            recipe["features"] = tuple(map(int, recipe["features"]))
            recipe["temperatures"] = tuple(map(float, recipe["temperatures"]))
            return cls(
                recipe=Recipe(**recipe),
                next_prompt=int(content["next_prompt"]),
                skipped=dict(content["skipped"]),
                complete=bool(content["complete"]),
                shards=tuple(ShardEntry(**shard) for shard in content["shards"]),
            )
        except MALFORMED as error:
            raise ConfigurationError(f"'{path}' is damaged: {error!r}") from error


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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class TopRows:
    """The most likely next tokens of each row."""

    ids: Tensor  # token ids, best first, shape (rows, K), int64
    logits: Tensor  # log-probabilities at temperature 1, shape (rows, K), float32
    lse: Tensor  # logarithm of the sum of exponentials of all logits, shape (rows,), float32


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One text: a prompt and an answer of the target, with states of all tokens but the last.

    Row i holds the states at token i, from which token i + 1 is predicted; so `tokens` has one entry more than the
    states have rows.
    """

    tokens: Tensor  # token ids, shape (rows + 1,), int64
    prompt_length: int  # tokens of the prompt; rows from `prompt_length - 1` on predict the answer
    features: Tensor  # inputs of the captured layers, shape (rows, layers, hidden), in the dtype of the target
    # output of the last layer before the final norm, shape (rows, hidden); None with a top-k teacher
    last: Tensor | None
    top: TopRows | None  # None without a top-k teacher
    temperature: float
    seed: int
    prompt_id: int  # index of the prompt among all prompts of the data

    @property
    def num_rows(self) -> int:
        return self.features.shape[0]


def stacked(texts: Sequence[Text]) -> dict[str, Tensor]:
    """Return the tensors of a shard of these texts; the format is described in `train/data/shards.py`."""
    lengths = torch.tensor([0, *(text.num_rows for text in texts)])
    tensors = {
        "tokens": torch.cat([text.tokens[:-1] for text in texts]).int(),
        "starts": lengths.cumsum(0),
        "ends": torch.stack([text.tokens[-1] for text in texts]).int(),
        "prompt_lengths": torch.tensor([text.prompt_length for text in texts], dtype=torch.int32),
        "temperatures": torch.tensor([text.temperature for text in texts], dtype=torch.float32),
        "seeds": torch.tensor([text.seed for text in texts], dtype=torch.int64),
        "prompt_ids": torch.tensor([text.prompt_id for text in texts], dtype=torch.int64),
        "features": torch.cat([text.features for text in texts]),
    }
    if texts[0].last is not None:
        tensors["last"] = torch.cat([text.last for text in texts if text.last is not None])
    tops = [text.top for text in texts if text.top is not None]
    if tops:
        tensors["top_ids"] = torch.cat([top.ids for top in tops]).int()
        tensors["top_logits"] = torch.cat([top.logits for top in tops]).half()
        tensors["lse"] = torch.cat([top.lse for top in tops])
    return tensors


def text_of(tensors: dict[str, Tensor], index: int) -> Text:
    """Return one text of a shard; features and last states are views."""
    first, end = (int(tensors["starts"][place]) for place in (index, index + 1))
    top = None
    if "lse" in tensors:
        ids, logits, lse = (tensors[name][first:end] for name in ("top_ids", "top_logits", "lse"))
        top = TopRows(ids.long(), logits.float(), lse)
    return Text(
        tokens=torch.cat([tensors["tokens"][first:end], tensors["ends"][index : index + 1]]).long(),
        prompt_length=int(tensors["prompt_lengths"][index]),
        features=tensors["features"][first:end],
        last=tensors["last"][first:end] if "last" in tensors else None,
        top=top,
        temperature=round(float(tensors["temperatures"][index]), 6),  # 0.8 and not the nearest float32
        seed=int(tensors["seeds"][index]),
        prompt_id=int(tensors["prompt_ids"][index]),
    )


HIDDEN, TOP_K = "hidden", "top-k"
ROWS = 256  # rows of logits that are computed at a time


def top_k_of(teacher: str, vocab_size: int) -> int | None:
    """Return K of "top-k:K", or None for "hidden"."""
    kind, _, count = teacher.partition(":")
    if teacher == HIDDEN:
        return None
    if kind != TOP_K or not count.isdecimal() or not 0 < int(count) <= vocab_size:
        raise ConfigurationError(
            f"teacher is '{teacher}': give 'hidden', or 'top-k:K' with K from 1 to {vocab_size}, such as top-k:64"
        )
    return int(count)


@final
class TopTeacher:
    """Computes the most likely next tokens of states, in float32."""

    def __init__(self, model: LanguageModel, count: int) -> None:
        self._model = model
        self._count = count
        self._facts = model.embedding_facts()
        self._head = model.output_head().float()

    @torch.inference_mode()
    def top(self, last: Tensor) -> TopRows:
        """Return the top tokens of outputs of the last layer, shape (rows, hidden)."""
        parts = []
        for rows in last.split(ROWS):
            logits = self._facts.logits(self._model.final_norm(rows), self._head.to(self._model.device))
            lse = logits.logsumexp(dim=-1)
            values, ids = logits.topk(self._count, dim=-1)
            parts.append((ids.cpu(), (values - lse[:, None]).half().float().cpu(), lse.cpu()))
        ids, logits, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return TopRows(ids, logits, lse)


OPEN_SHARDS = 64  # shards that are mapped at a time
UNSEEN_SHARE = 0.05


COMMON = ("fingerprint", "dtype", "quantization", "features", "num_layers", "hidden", "vocab", "teacher", "chat")
"""Parts of a recipe that folders which are read together share."""


@dataclass(frozen=True, slots=True)
class DataFolder:
    """One folder of training data, and the numbers of its texts among those of all folders."""

    path: Path
    manifest: Manifest
    texts: range


@final
class TrainingData:
    """Texts of one or several folders of training data, as a sequence: folder by folder, in the order of the prompts.

    `folders`: as written by 'draftree train data', of one target, with the same captured layers and teacher.
    """

    def __init__(self, *folders: Path | str, verify: bool = True) -> None:
        if not folders:
            raise ConfigurationError("no folder of training data was given")
        self._places: list[tuple[DataFolder, int, int]] = []
        self.folders: list[DataFolder] = []
        for path in map(Path, folders):
            manifest = Manifest.read(path)
            if any(path.resolve() == other.path.resolve() for other in self.folders):
                raise ConfigurationError(f"'{path}' is given twice: name each folder of training data once")
            for other in self.folders[:1]:
                if difference := manifest.recipe.difference(other.manifest.recipe, COMMON):
                    raise ConfigurationError(f"'{path}' does not fit '{other.path}': {difference} there")
            for shard in manifest.shards if verify else ():
                _verify(path / shard.file, shard.sha256)
            first = len(self._places)
            folder = DataFolder(path, manifest, range(first, first + manifest.num_texts))
            self.folders.append(folder)
            self._places += [
                (folder, number, index) for number, shard in enumerate(manifest.shards) for index in range(shard.texts)
            ]
        self._tensors = lru_cache(OPEN_SHARDS)(shard_tensors)

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
        """Divide the texts by a hash of their prompt's id: a prompt of the same sets is always on the same side."""
        if not 0 <= unseen_share < 1:
            raise ConfigurationError(f"unseen_share is {unseen_share}: it must be at least 0 and below 1")
        sides: tuple[list[int], list[int]] = ([], [])
        for index, prompt in enumerate(self.prompt_ids()):
            sides[is_unseen(prompt, unseen_share)].append(index)
        return sides

    def counts(self, texts: Sequence[int] | None = None, *, answers_only: bool = True) -> Tensor:
        """Return counts of tokens by id in some texts (None: all), shape (vocab,), int64."""
        vocab = self.recipe.vocab
        counts = torch.zeros(vocab, dtype=torch.int64)
        for index in range(len(self)) if texts is None else texts:
            text = self[index]
            counts += text.tokens[text.prompt_length if answers_only else 0 :].bincount(minlength=vocab)
        return counts


def is_unseen(prompt_id: int, share: float) -> bool:
    """Return whether texts of a prompt are held out from training, by a hash of its id."""
    digest = hashlib.blake2b(str(prompt_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def shard_tensors(folder: Path, shard: ShardEntry) -> dict[str, Tensor]:
    """Return the tensors of a shard, memory-mapped."""
    path = folder / shard.file
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"'{path}' cannot be read: {error}") from error
    sizes = [len(tensors.get(name, ())) for name in ("starts", "tokens")]
    if sizes != [shard.texts + 1, shard.tokens]:
        raise ConfigurationError(f"'{path}' is not the shard of its manifest: restore it, or make the data again")
    return tensors


def _verify(path: Path, wanted: str) -> None:
    try:
        checksum = sum_of(path)
    except OSError as error:
        raise ConfigurationError(f"'{path}' cannot be read: {error.strerror}") from error
    if checksum != wanted:
        raise ConfigurationError(
            f"'{path}' is damaged: its SHA-256 checksum is {checksum[:12]}…, and the manifest has {wanted[:12]}…"
        )


# Writing of training data: texts are added in order, shards are closed at a size, and a stop at any time is safe.
#
# Files are written under a temporary name and renamed; the manifest is replaced last. A folder therefore always holds
# the state of its manifest, and other files in it are left over from an interrupted write. The last shard may be
# unfinished: its name has the number of its texts, and it is read again when the folder is continued.

OWN_FILE = re.compile(r"shard-\d{5}(-first-\d+)?\.safetensors|manifest\.json")


class ShardWriter:
    """Writes texts to a folder, or continues a folder with an equal recipe.

    `folder`: new or empty, or a folder of training data. `row_bytes`: stored bytes per row.
    """

    def __init__(self, folder: Path, recipe: Recipe, *, row_bytes: int) -> None:
        self._folder = folder
        self._limit = max(1, recipe.shard_bytes // row_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = PathLock(folder)
        except BlockingIOError as error:
            raise ConfigurationError(f"another process writes data to '{folder}': wait until it ends") from error
        manifest = continued(folder, recipe)
        self.manifest = Manifest(recipe=recipe) if manifest is None else manifest
        if manifest is None:
            self.manifest.write(folder)
        self._done: tuple[Text | str, ...] = ()
        """Texts of the unfinished shard, and the reasons of prompts without a text. Changed in one assignment only, so
        that an interruption at any time leaves a consistent state."""
        self._remove_leftovers()
        self._closed = self.manifest  # the folder without its unfinished shard
        self._reopen()

    @property
    def next_prompt(self) -> int:
        """Number of prompts that are done or skipped."""
        return self._closed.next_prompt + len(self._done)

    @property
    def skipped(self) -> dict[str, int]:
        """Number of skipped prompts by reason."""
        reasons = Counter(self._closed.skipped) + Counter(entry for entry in self._done if isinstance(entry, str))
        return dict(sorted(reasons.items()))

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
        """Write what was added, so that the folder can be used and continued; `complete` if it is all of the data."""
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
        manifest = replace(
            self._closed, shards=shards, next_prompt=self.next_prompt, skipped=self.skipped, complete=complete
        )
        manifest.write(self._folder)
        self.manifest = manifest
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
            match = OWN_FILE.fullmatch(path.name.removesuffix(TEMPORARY))
            if match is not None and path.name not in known:
                path.unlink()


def continued(folder: Path, recipe: Recipe) -> Manifest | None:
    """Return the manifest of a folder with data of this recipe; None if the folder is empty."""
    if not (folder / MANIFEST).exists():
        others = sorted(path.name for path in folder.iterdir() if not path.name.endswith(TEMPORARY))
        if others:
            raise ConfigurationError(f"'{folder}' holds other files ('{others[0]}'): choose an empty or a new folder")
        return None
    manifest = Manifest.read(folder)
    if different := recipe.difference(manifest.recipe):
        raise ConfigurationError(
            f"'{folder}' cannot be continued: {different}; repeat the options of the first run, or choose a new folder"
        )
    return manifest
