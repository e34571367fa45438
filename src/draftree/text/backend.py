"""Calls of the `tokenizers` library: limits of its files, and long texts without Python's lock.

The library ends the process when it cannot allocate memory, and a small file can ask for any amount: each step of a
tokenizer may lengthen what the step before wrote. So files are checked before it reads them.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftree.core.files import MALFORMED, MAX_JSON_BYTES, read_json

PATTERNS = ("*token*", "vocab*", "merges*", "chat_template*", "tekken.json")
MAX_TOKENS = 1 << 24  # limit of token ids: lists by id are kept; the largest known vocabularies have a million tokens
MAX_GROWTH = 1024
"""Bytes that may become of one: the compositions of NFKC become up to 33, and a space in them three more."""
MAX_COPIES = 4  # copies of a text that a post-processor may write
MAX_ADDED = 1000  # tokens that a post-processor may write around a text


def check_tokenizer_files(folder: Path) -> None:
    """Raise for files that are too large, or with which a short text takes unbounded memory."""
    for pattern in PATTERNS:
        for path in folder.glob(pattern):
            if path.is_file() and path.stat().st_size > MAX_JSON_BYTES:
                raise ValueError(f"{path.name} has more than {MAX_JSON_BYTES >> 20} MiB")
    try:
        content = read_json(folder / "tokenizer.json")
    except FileNotFoundError:
        return
    for parts in (("normalizer", "pre_tokenizer", "model"), ("decoder",)):
        growth = math.prod(_growth(step) for part in parts for step in _steps(content.get(part)))
        if growth > MAX_GROWTH:
            raise ValueError(f"{' and '.join(parts)} of tokenizer.json lengthen a text more than {MAX_GROWTH} times")
    around = [_copies(step) for step in _steps(content.get("post_processor"))]
    if math.prod(max(1, copies) for copies, _ in around) > MAX_COPIES:
        raise ValueError(f"the post_processor of tokenizer.json writes a text more than {MAX_COPIES} times")
    if sum(added for _, added in around) > MAX_ADDED:
        raise ValueError(f"the post_processor of tokenizer.json writes more than {MAX_ADDED} tokens around a text")


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part of a tokenizer; a step of another form is left to the library, which refuses it."""
    if isinstance(part, Mapping):
        yield part
        for name in ("normalizers", "pretokenizers", "decoders", "processors"):
            for step in part.get(name) or ():
                yield from _steps(step)


def _growth(step: Mapping[str, Any]) -> int:
    """Return an upper bound of the bytes that a step writes for one byte."""
    if step.get("type") == "ByteLevel":
        return 2
    if step.get("type") == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap"))
    names = ("content", "prepend", "continuing_subword_prefix", "end_of_word_suffix")
    written = [str(step[name]) for name in names if step.get(name) is not None]
    return max(1, len("".join(written).encode("utf-8", "surrogatepass")))


def _longest_replacement(table: Any) -> int:
    """Return the length of the longest replacement in a table: the size of a trie, the trie, texts that end with 0."""
    try:
        content = base64.b64decode(table, validate=True)
        place = 4 + int.from_bytes(content[:4], "little")
    except MALFORMED:
        raise ValueError("the precompiled_charsmap of tokenizer.json is damaged") from None
    if not 4 < place <= len(content):
        raise ValueError("the precompiled_charsmap of tokenizer.json is damaged")
    return max(1, *map(len, content[place:].split(b"\0")))


def _copies(step: Mapping[str, Any]) -> tuple[int, int]:
    """Return how often a step of the post-processor writes the text, and how many tokens it adds."""
    if step.get("type") != "TemplateProcessing":
        return 1, 2
    copies = 0
    added = 0
    try:
        for piece in step["single"]:
            if "Sequence" in piece:
                copies += 1
            else:
                added += len(step["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    except MALFORMED:
        raise ValueError("the post_processor of tokenizer.json is damaged") from None
    return copies, added


LONG = 10_000  # characters or ids from which a text is a batch: it takes about 5 ms


def encoded(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the ids of a text."""
    if len(text) < LONG:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    else:
        ids = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def decoded(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of ids."""
    if len(ids) < LONG:
        text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    else:
        (text,) = tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)
    return text
