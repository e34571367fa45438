"""Text of single tokens, for displays and traces."""

from __future__ import annotations

from collections.abc import Callable

from draftree.core.errors import VocabularyMismatchError
from draftree.text.retokenize.lexicon import lexicon_of
from draftree.text.tokenizer import Tokenizer

__all__ = ["pieces_of"]


def pieces_of(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """Return a function from a token id to its text inside a text.

    Bytes that form no character become U+FFFD. A token without bytes of its own is written as its name in the
    vocabulary, and without a tokenizer as its id in brackets.
    """
    if tokenizer is None:
        return "[{}]".format
    names = tokenizer.vocabulary()
    try:
        table = lexicon_of(tokenizer).bytes_of
    except VocabularyMismatchError:  # bytes depend on the tokens around
        table = ()

    def piece(token: int) -> str:
        data = table[token] if 0 <= token < len(table) else None
        if data is not None:
            return data.decode("utf-8", errors="replace")
        return (names[token] if 0 <= token < len(names) else "") or f"[{token}]"

    return piece
