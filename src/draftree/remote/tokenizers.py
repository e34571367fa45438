"""Tokenizers on the way to devices: their files as texts, and a fingerprint of what they do."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftree.core.errors import ModelLoadError
from draftree.core.files import MALFORMED, parse_json
from draftree.text.tokenizer import Tokenizer

TOKENIZER_PATH = "/v1/verify/tokenizer"  # path of a GET request for the files
JSON_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "config.json",
)  # fmt: skip
TEXT_FILES = ("merges.txt", "vocab.txt", "chat_template.jinja")
FILES = frozenset((*JSON_FILES, *TEXT_FILES))
MAX_BYTES = 64 << 20
OTHER = re.compile(r"[^A-Za-z0-9_-]", re.ASCII)
"""Characters of a model's name that the name of its folder does not have."""
MAX_NAME, DIGITS = 64, 32
MAX_KEPT = 8  # most folders of one model whose files a device names as present
DIGEST = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
COMPLETE = "complete"  # file that is written last
UNUSABLE = "the server's tokenizer files cannot be used: name a local copy, remote:URL?tokenizer=FOLDER"
PROBE = "The café – 12,345 naïve façades.\n\tdef f(x): return x  # 東京 😀\r\n  end"
"""Text whose tokens are part of the fingerprint: tokenizers with one vocabulary may split it differently."""


def tokenizer_fingerprint(tokenizer: Tokenizer | None) -> str:
    """Return a hash of the vocabulary and of the split of a probe text; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    content = [tokenizer.vocabulary(), tokenizer.encode(PROBE), tokenizer.encode_literally(PROBE)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def tokenizer_files(tokenizer: Tokenizer | None) -> dict[str, str]:
    """Return the files of a tokenizer by name; empty without one, and for one that has no tokenizer.json."""
    if tokenizer is None:
        return {}
    with tempfile.TemporaryDirectory() as where:
        tokenizer.backend.save_pretrained(where)
        paths = [Path(where) / name for name in sorted(FILES)]
        files = {path.name: path.read_text("utf-8") for path in paths if path.is_file()}
    return files if "tokenizer.json" in files else {}


def files_digest(files: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:DIGITS]


def kept_digests(model: str, where: Path) -> list[str]:
    """Return the digests of a model's files that `install_files` wrote into a folder, the latest first."""
    start, times = f"{_plain(model)}-", dict[str, float]()
    for path in where.glob(f"{start}*"):
        digest = path.name.removeprefix(start)
        if DIGEST.fullmatch(digest) and (path / COMPLETE).is_file():  # else of a model with a longer name
            times[digest] = (path / COMPLETE).stat().st_mtime
    return sorted(times, key=times.__getitem__, reverse=True)[:MAX_KEPT]


def install_files(content: bytes, where: Path) -> Path:
    """Write the files of a server into a folder, after checks; the folder is named after the model and their content.

    `content`: JSON object with `files`, a map from names to texts, or the digest of files that are present as `known`,
    and the name of the `model`.
    """
    model, files, digest = _checked(content)
    folder = where / f"{_plain(model)}-{digest}"
    if (folder / COMPLETE).is_file():
        return folder
    if not files:
        raise ModelLoadError(UNUSABLE)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    (folder / COMPLETE).write_text("", "utf-8")  # last: an interrupted write is repeated
    return folder


def _plain(model: str) -> str:
    return OTHER.sub("-", model)[:MAX_NAME]


def _checked(content: bytes) -> tuple[str, Mapping[str, str], str]:
    """Return the model's name, its files, and their digest; no files if the server names those that are present."""
    try:
        message: Any = parse_json(content)
        model, known, files = message["model"], message.get("known"), message.get("files", {})
        assert isinstance(model, str)
        assert isinstance(files, dict)
        assert known is None or (isinstance(known, str) and DIGEST.fullmatch(known))
        assert all(name in FILES and isinstance(text, str) for name, text in files.items())
        for name in files:
            if name in JSON_FILES and not isinstance(parse_json(files[name]), dict | list):
                raise ValueError(name)
    except (AssertionError, *MALFORMED) as error:
        raise ModelLoadError(UNUSABLE) from error
    return model, files, files_digest(files) if known is None else known
