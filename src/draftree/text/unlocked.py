"""Long texts by the `tokenizers` library, whose single calls keep Python's lock, and whose batches do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["decoded", "encoded"]

LONG = 10_000
"""Characters or ids from which a text is a batch: it takes about 5 ms."""


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
