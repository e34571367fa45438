"""Chat completions through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from draftree import SamplingParams
from serving import NAME, Running, running_server, tiny_llm

MESSAGES: Any = [{"role": "user", "content": "The quick brown fox"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def expected(**given: Any) -> list[str]:
    return [done.text for done in tiny_llm(None).chat(MESSAGES, SamplingParams(**given))]


def test_text_equals_the_librarys(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=24, seed=7)
    assert [choice.message.content for choice in answer.choices] == expected(max_tokens=24, seed=7)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24


def test_streamed_choices_equal_the_librarys(client: openai.OpenAI) -> None:
    texts = ["", "", ""]
    reasons = {}
    stream = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=24, seed=7, n=3, stream=True)
    roles = []
    for chunk in stream:
        (choice,) = chunk.choices
        roles += [choice.delta.role] if choice.delta.role else []
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == expected(max_tokens=24, seed=7, n=3)
    assert roles == ["assistant"] * 3
    assert reasons == dict.fromkeys(range(3), "length")
