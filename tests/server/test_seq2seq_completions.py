"""Plain completions of an encoder-decoder model: the prompt is the source."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import httpx
import pytest

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.serve.pool import ServedModel
from seq2seq_samples import written_model
from serving import NAME, events, running_server, tiny_tokenizer
from translators import CODES, tokenizer, translated, translator

PROMPTS = ["translate: The quick brown fox", "sum: a"]
BODY = {"model": NAME, "prompt": PROMPTS, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    llm = AsyncLLM(written_model(tiny_tokenizer()), "suffix", tokenizer=tiny_tokenizer())
    with running_server([ServedModel(NAME, llm)]) as running:
        yield running.url


def expected() -> list[str]:
    llm = LLM(written_model(tiny_tokenizer()), "none", tokenizer=tiny_tokenizer())
    return [done.text for done in llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0))]


def test_completions_and_streams_equal_the_library(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        answer = http.post("/v1/completions", json={**BODY, "return_token_ids": True}).json()
        found = ["", ""]
        for chunk in events(http, "/v1/completions", {**BODY, "stream": True}):
            for choice in chunk["choices"]:
                found[choice["index"]] += choice["text"]
    assert [choice["text"] for choice in answer["choices"]] == expected() == found
    rows = [tiny_tokenizer().encode(prompt) for prompt in PROMPTS]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == rows
    assert answer["usage"]["prompt_tokens"] == sum(map(len, rows))


def test_log_probabilities_of_the_text_are_given_and_those_of_the_source_refused(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        scored = http.post("/v1/completions", json={**BODY, "logprobs": 1})
        refused = http.post("/v1/completions", json={**BODY, "prompt_logprobs": 1})
    assert all("".join(choice["logprobs"]["tokens"]) for choice in scored.json()["choices"])
    assert refused.status_code == 400
    assert "encoder" in refused.json()["error"]["message"]


CHAT = {"model": NAME, "messages": [{"role": "user", "content": "fox"}], "max_tokens": 12, "temperature": 0}


def test_a_decoder_prompt_begins_completions_and_answers(url: str) -> None:
    llm = LLM(written_model(tiny_tokenizer()), "none", tokenizer=tiny_tokenizer())
    params = SamplingParams(max_tokens=12, temperature=0)
    wanted = [done.text for done in llm.generate(PROMPTS, params, decoder_prompt="The ")]
    (answer,) = llm.chat(CHAT["messages"], params, decoder_prompt="The ")  # type: ignore[arg-type]
    assert wanted != expected()
    with httpx.Client(base_url=url) as http:
        for given in ("The ", tiny_tokenizer().encode("The ", add_special_tokens=False)):
            body = {**BODY, "decoder_prompt": given}
            choices = http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
            assert [choice["text"] for choice in choices] == wanted
        found = http.post("/v1/chat/completions", json={**CHAT, "decoder_prompt": "The "}).json()
        chunks = list(events(http, "/v1/chat/completions", {**CHAT, "decoder_prompt": "The ", "stream": True}))
    assert found["choices"][0]["message"]["content"] == answer.text
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == answer.text


def test_options_that_the_model_does_not_have_are_refused(url: str) -> None:
    with httpx.Client(base_url=url) as http:
        for path, body, field in (
            ("completions", {**BODY, "target_lang": "de"}, "target_lang"),
            ("completions", {**BODY, "source_lang": "de"}, "source_lang"),
            ("completions", {**BODY, "decoder_prompt": []}, "decoder_prompt"),
            ("completions", {**BODY, "decoder_prompt": ""}, "decoder_prompt"),
            ("completions", {**BODY, "decoder_prompt": [9999]}, "decoder_prompt"),
            ("chat/completions", {**CHAT, "source_lang": "de"}, "source_lang"),
        ):
            answer = http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == field, answer.text


def test_translations_take_the_languages_of_the_request() -> None:
    source, target = CODES["nllb"]
    wanted = translated("nllb", "the fox", source=source, target=target, length=12)
    served = AsyncLLM(copy.deepcopy(translator("nllb")), "none", tokenizer=tokenizer("nllb"))
    body = {"prompt": "the fox", "source_lang": source, "target_lang": target, "max_tokens": 12, "temperature": 0}
    with running_server([ServedModel(NAME, served)]) as running, httpx.Client(base_url=running.url) as http:
        answer = http.post("/v1/completions", json={**body, "return_token_ids": True}).raise_for_status().json()
        wrong = http.post("/v1/completions", json={**body, "target_lang": "deu_latn"})
    assert answer["choices"][0]["token_ids"] == wanted
    assert wrong.status_code == 400
    assert "deu_Latn" in wrong.json()["error"]["message"]


def test_causal_models_refuse_the_options() -> None:
    with running_server() as running, httpx.Client(base_url=running.url) as http:
        for name in ("decoder_prompt", "source_lang", "target_lang"):
            for path, body in (("completions", {**BODY, "prompt": "a"}), ("chat/completions", CHAT)):
                answer = http.post(f"/v1/{path}", json={**body, name: "x"})
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == name
