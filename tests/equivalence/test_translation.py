"""Languages of multilingual models: equal to `generate` of transformers, in the library and its streams."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.options import RequestOptions
from seq2seq_samples import sample
from serving import tiny_model, tiny_tokenizer
from translators import CODES, tokenizer, translated, translator

LENGTH = 14
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)
TEXTS = ["the quick fox", "a dog sleeps."]


def opened(kind: str, **given: Any) -> LLM:
    return LLM(copy.deepcopy(translator(kind)), tokenizer=tokenizer(kind), **given)


@pytest.mark.parametrize("draft", [None, "suffix"])
@pytest.mark.parametrize("kind", CODES)
def test_translations_equal_generate(kind: str, draft: str | None) -> None:
    one, other = CODES[kind]
    llm = opened(kind, draft=draft)
    for source, target in ((one, other), (other, one)):
        wanted = [translated(kind, text, source=source, target=target, length=LENGTH) for text in TEXTS]
        found = llm.generate(TEXTS, GREEDY, source_lang=source, target_lang=target)
        assert [list(done.token_ids) for done in found] == wanted
        assert found[0].stats.prompt_tokens == len(_encoded(kind, TEXTS[0], source))
        assert llm.prompts.encode(TEXTS[0], source_lang=source) == _encoded(kind, TEXTS[0], source)
    assert tokenizer(kind).src_lang == one, "the tokenizer's own language is restored"


def _encoded(kind: str, text: str, source: str) -> list[int]:
    own = copy.deepcopy(tokenizer(kind))
    own.src_lang = source
    return list(own(text).input_ids)


@pytest.mark.parametrize("kind", CODES)
def test_a_decoder_prompt_follows_the_target_language(kind: str) -> None:
    _, other = CODES[kind]
    llm = opened(kind)
    start = tokenizer(kind).convert_tokens_to_ids(other)
    (done,) = llm.generate("fox", GREEDY, target_lang=other, decoder_prompt="der")
    own = tokenizer(kind)("der", add_special_tokens=False).input_ids
    (by_ids,) = llm.generate("fox", GREEDY, target_lang=other, decoder_prompt=own)
    assert done.token_ids == by_ids.token_ids
    (sequence,) = llm.requests.sequences(
        [5, 6], llm.prompts.with_start(RequestOptions.of(GREEDY, target_lang=other, decoder_prompt="der"))
    )
    before = [2] if kind == "nllb" else []
    assert sequence.history.tokens.tolist() == [*before, start, *own]


def test_streams_and_asynchronous_requests_take_languages() -> None:
    source, target = CODES["nllb"]
    given: Any = {"source_lang": target, "target_lang": source, "decoder_prompt": "a"}
    (wanted,) = opened("nllb").generate(TEXTS[0], GREEDY, **given)
    assert "".join(opened("nllb").stream(TEXTS[0], GREEDY, **given)) == wanted.text

    async def run() -> tuple[str, str, str]:
        async with AsyncLLM(copy.deepcopy(translator("nllb")), "none", tokenizer=tokenizer("nllb")) as llm:
            streamed = [piece async for piece in llm.stream(TEXTS[0], GREEDY, **given)]
            updates = [one async for one in llm.stream_updates(TEXTS[0], GREEDY, **given)]
            (done,) = await llm.generate(TEXTS[0], GREEDY, **given)
            pieces = "".join(piece.text for one in updates for piece in one.pieces)
            return "".join(streamed), pieces, done.text

    assert asyncio.run(run()) == (wanted.text,) * 3


def test_options_that_cannot_be_honoured_are_refused() -> None:
    llm, other = opened("nllb"), CODES["nllb"][1]
    with pytest.raises(InvalidRequestError, match="did you mean 'deu_Latn'"):
        llm.generate("fox", GREEDY, target_lang="deu_latn")
    with pytest.raises(InvalidRequestError, match=r"source_lang is 'xx'.*194 more"):
        llm.generate("fox", GREEDY, source_lang="xx")
    with pytest.raises(InvalidRequestError, match="states the language of a text"):
        llm.generate([5, 6], GREEDY, source_lang=other)
    with pytest.raises(InvalidRequestError, match="give a text or token ids"):
        llm.generate("fox", GREEDY, decoder_prompt=[])
    with pytest.raises(InvalidRequestError, match="did you mean 'target_lang'"):
        llm.generate("fox", GREEDY, target_language=other)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        LLM(sample("bart"), "none").generate([5], GREEDY, target_lang="de")
    causal = LLM(tiny_model(), "none", tokenizer=tiny_tokenizer())
    for options in ({"source_lang": "en"}, {"target_lang": "en"}, {"decoder_prompt": "a"}):
        with pytest.raises(InvalidRequestError, match=f"{next(iter(options))} is for encoder-decoder models"):
            causal.generate("fox", GREEDY, **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=f"{next(iter(options))} "):
            causal.chat([{"role": "user", "content": "a"}], GREEDY, **options)  # type: ignore[arg-type]
