"""Plain completions of an encoder-decoder model: the prompt is the source."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.serve.pool import ServedModel
from seq2seq_samples import written_model
from serving import NAME, events, running_server, tiny_tokenizer

PROMPTS = ["translate: The quick brown fox", "sum: a"]
BODY = {"model": NAME, "prompt": PROMPTS, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    llm = AsyncLLM(written_model(tiny_tokenizer()), "suffix", tokenizer=tiny_tokenizer())
    with running_server([ServedModel(NAME, llm)]) as running:
        yield running.url


def expected() -> list[str]:
    llm = LLM(written_model(tiny_tokenizer()), tokenizer=tiny_tokenizer())
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
