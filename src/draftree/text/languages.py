"""Languages of multilingual tokenizers, whose texts state a language by a token: M2M100, mBART, NLLB, PLBart."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from draftree.core.errors import InvalidRequestError

UNDERLINED = re.compile(r"__(.+?)__")  # token of a language in M2M100 and PLBart: __de__
WITH_PLACE = re.compile(r"[a-z]{2,3}_[A-Z][A-Za-z]{1,3}")  # token of a language in mBART (de_DE) and NLLB (deu_Latn)


def languages_of(backend: Any) -> dict[str, int]:
    """Return the token of each language of a tokenizer of transformers, by the code of the language.

    Empty for tokenizers whose texts have no language.
    """
    if not hasattr(backend, "src_lang"):
        return {}
    languages: dict[str, int] = {}
    for token, content in _special_tokens(backend).items():
        underlined = UNDERLINED.fullmatch(content)
        if underlined is not None:
            languages[underlined[1]] = token
        elif WITH_PLACE.fullmatch(content):
            languages[content] = token
    return languages


def _special_tokens(backend: Any) -> dict[int, str]:
    added = {int(token): str(added_token.content) for token, added_token in backend.added_tokens_decoder.items()}
    codes: Mapping[str, int] = getattr(backend, "lang_token_to_id", None) or {}
    return {**{int(token): name for name, token in codes.items()}, **added}


def language_token(languages: Mapping[str, int], code: object, *, param: str, name: str) -> int:
    """Return the token of a language.

    `code`: code of the language, as the model's tokenizer writes it.
    """
    if not languages:
        raise InvalidRequestError(
            f"{param} was given, but the tokenizer of {name} has no tokens of languages: leave it out, and state the "
            "language as the model was trained to read it, such as 'translate English to German: ' before the text",
            param=param,
        )
    if not isinstance(code, str) or code not in languages:
        raise InvalidRequestError(
            f"{param} is {str(code)[:40]!r}, which is no language of {name}: {_hint(str(code), languages)}", param=param
        )
    return languages[code]


def _hint(code: str, languages: Mapping[str, int]) -> str:
    """Return the closest codes, since a model may have hundreds."""
    close = difflib.get_close_matches(code, languages, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    shown = sorted(languages)[:8]
    more = f" and {len(languages) - len(shown)} more" if len(languages) > len(shown) else ""
    return f"known are {', '.join(map(repr, shown))}{more}"


@contextmanager
def reading(backend: Any, code: str) -> Iterator[None]:
    """Let a tokenizer of transformers add the tokens of a language around texts; restore its own at the end."""
    before = backend.src_lang
    backend.src_lang = code
    try:
        yield
    finally:
        backend.src_lang = before
