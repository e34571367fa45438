"""Conversations as the template formats them: open last messages, variables and names."""

from __future__ import annotations

from typing import Any

import httpx

from draftree import SamplingParams
from serving import NAME, tiny_llm

URL = "/v1/chat/completions"
OPEN: list[dict[str, Any]] = [{"role": "user", "content": "The quick"}, {"role": "assistant", "content": "brown fox"}]
BODY: dict[str, Any] = {"model": NAME, "max_tokens": 12, "seed": 3}


def test_the_final_message_is_continued(http: httpx.Client) -> None:
    llm = tiny_llm(None)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.apply_chat_template(OPEN[:1]) + llm.tokenizer.encode_literally("brown fox")
    (done,) = llm.generate([ids], SamplingParams(max_tokens=12, seed=3))
    answer = http.post(URL, json={**BODY, "messages": OPEN, "continue_final_message": True}).json()
    assert answer["choices"][0]["message"]["content"] == done.text
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_no_header_of_an_answer(http: httpx.Client) -> None:
    llm = tiny_llm(None)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.apply_chat_template(OPEN, add_generation_prompt=False)
    answer = http.post(URL, json={**BODY, "messages": OPEN, "add_generation_prompt": False, "return_token_ids": True})
    assert answer.json()["prompt_token_ids"] == ids


def refused(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post(URL, json={**BODY, "messages": OPEN, **fields})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_what_cannot_be_continued(http: httpx.Client) -> None:
    error = refused(http, messages=OPEN[:1], continue_final_message=True)
    assert error["param"] == "continue_final_message"
    error = refused(http, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "add_generation_prompt"


def test_what_the_template_does_not_read(http: httpx.Client) -> None:
    assert refused(http, chat_template_kwargs={"enable_thinking": True})["param"] == "chat_template_kwargs"
    named = [{"role": "user", "content": "hello", "name": "Ann"}]
    assert refused(http, messages=named)["param"] == "messages[0].name"
    called = [{"role": "user", "content": "hello", "tool_call_id": "x"}]
    assert refused(http, messages=called)["param"] == "messages[0].tool_call_id"
    assert refused(http, messages=[{"role": "assistant"}])["param"] == "messages[0].content"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    assert refused(http, tools=tools)["param"] == "tools"
    assert refused(http, tool_choice="required")["param"] == "tool_choice"
