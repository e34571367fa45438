"""Spaces between special tokens: kept as the tokenizer writes them, or omitted as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draftree.core.errors import InvalidRequestError
from draftree.text.detokenize import Detokenizer
from draftree.text.schemes import choose_scheme
from draftree.text.tokenizer import Tokenizer
from text_backends import byte_fallback, byte_level, words

MIXED = ["The", "<|im_start|>", "<|im_end|>", "<s>", "fox", "<s>", "dog", "</s>", "</s>"]


def text_of(tokenizer: Tokenizer, ids: Sequence[int], *, spaces: bool, skip: bool = False, prompt: Sequence[int] = ()):  # type: ignore[no-untyped-def]
    detokenizer = Detokenizer(
        tokenizer, skip_special_tokens=skip, spaces_between_special_tokens=spaces, prompt_ids=prompt
    )
    return "".join(detokenizer.push(ids)) + detokenizer.finish()


def ids_of(tokenizer: Tokenizer) -> list[int]:
    vocabulary = tokenizer.vocabulary()
    return [vocabulary.index(token) for token in MIXED]


def test_they_are_left_out_between_special_tokens_and_nowhere_else() -> None:
    tokenizer = Tokenizer(words())
    ids = ids_of(tokenizer)
    assert text_of(tokenizer, ids, spaces=True) == tokenizer.decode(ids, False) == " ".join(MIXED)
    assert text_of(tokenizer, ids, spaces=False) == "The <|im_start|><|im_end|><s> fox <s> dog </s></s>"


def test_the_first_token_after_the_prompt_keeps_its_space() -> None:
    tokenizer = Tokenizer(words())
    ids = ids_of(tokenizer)
    assert text_of(tokenizer, ids[2:4], spaces=False, prompt=ids[:2]) == " <|im_end|><s>"


def test_nothing_changes_where_special_tokens_are_left_out() -> None:
    tokenizer = Tokenizer(words())
    ids = ids_of(tokenizer)
    assert text_of(tokenizer, ids, spaces=False, skip=True) == tokenizer.decode(ids, True)


@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
def test_tokenizers_that_write_no_spaces_are_left_as_they_are(backend: object) -> None:
    tokenizer = Tokenizer(backend())  # type: ignore[operator]
    text = "The fox<s></s>\u65e5\u672c<|im_start|><|im_end|> dog<s>"
    ids = tokenizer.encode(text)
    assert text_of(tokenizer, ids, spaces=False) == tokenizer.decode(ids, False)


def test_a_tokenizer_whose_text_cannot_be_streamed_is_refused() -> None:
    tokenizer = Tokenizer(words())
    backwards = choose_scheme(
        lambda ids: "".join(chr(97 + i) for i in reversed(ids)), {0: "a", 1: "b"}, skipped=frozenset(), decoder=None
    )
    assert not backwards.streams
    tokenizer._schemes[False] = backwards
    with pytest.raises(InvalidRequestError, match="spaces_between_special_tokens=False"):
        Detokenizer(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=False)
    Detokenizer(tokenizer, skip_special_tokens=False)
