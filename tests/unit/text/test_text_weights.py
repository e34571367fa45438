"""The tokenizers of real models: exact pieces of text, chats, and the pair that shares one vocabulary."""

from __future__ import annotations

from functools import cache

import pytest

from draftree.core.errors import InvalidRequestError
from draftree.text.retokenize import compare_vocabularies
from draftree.text.streams import ByteFallbackStream, ByteLevelStream
from draftree.text.tokenizer import Tokenizer
from real_weights import folder_of

pytestmark = pytest.mark.weights

SMOLLM = "smollm2-135m-instruct"
STORIES = "stories15m"
TEXT = "Once upon a time 日本語 😀🎉, naïve café 👨‍👩‍👧\n\n\tdef f(x):\n        return x  # 東京\n"


@cache
def tokenizer_of(name: str) -> Tokenizer:
    tokenizer = Tokenizer.load(folder_of(name))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(("name", "stream"), [(SMOLLM, ByteLevelStream), (STORIES, ByteFallbackStream)])
@pytest.mark.parametrize("skip", [True, False])
def test_text_is_written_without_decoding(name: str, stream: type, skip: bool) -> None:
    assert isinstance(tokenizer_of(name).text_scheme(skip_special_tokens=skip).open(), stream)


def test_the_chat_of_smollm() -> None:
    tokenizer = tokenizer_of(SMOLLM)
    ids = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, False) == expected
    assert {tokenizer.vocabulary()[i] for i in ids} & {"<|im_start|>", "<|im_end|>"} == {"<|im_start|>", "<|im_end|>"}
    assert tokenizer.eos_token_id in ids


def test_a_base_model_has_no_chat() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer_of(STORIES).apply_chat_template([{"role": "user", "content": "Hi"}])


def test_other_vocabularies_differ_from_the_first_id() -> None:
    vocabularies = [tokenizer_of(name).vocabulary() for name in (SMOLLM, STORIES)]
    assert [len(vocabulary) for vocabulary in vocabularies] == [49_152, 32_000]
    found = compare_vocabularies(*vocabularies)
    assert not found.same
    assert found.first_differences[0].token_id == 0
