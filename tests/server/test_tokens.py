"""/tokenize and /detokenize: the ids of the library, their strings, and refusals by field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from draftree.text.tokenizer import Tokenizer
from serving import CONTEXT, NAME, Running, tiny_tokenizer
from text_backends import byte_level
from tool_templates import HERMES

MESSAGES = [{"role": "user", "content": "The fox </s> runs"}]
TOOLS = [{"type": "function", "function": {"name": "run", "description": "Runs"}}]


@pytest.fixture
def server(families: Running) -> Running:
    return families


def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(), name="tiny")


def tokens(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["count"] == len(found["tokens"])
    return found


def test_a_prompt_is_encoded_as_for_a_completion(http: httpx.Client) -> None:
    for text in ("The fox </s>", "日本 😀", ""):
        assert tokens(http, model=NAME, prompt=text)["tokens"] == tokenizer().encode(text)
        bare = tokens(http, model=NAME, prompt=text, add_special_tokens=False)
        assert bare["tokens"] == tokenizer().encode(text, add_special_tokens=False)
        assert (bare["token_strs"], bare["max_model_len"]) == (None, CONTEXT)


def test_strings_of_tokens_are_those_of_the_vocabulary(http: httpx.Client) -> None:
    found = tokens(http, model=NAME, prompt="The fox </s>", return_token_strs=True)
    assert found["token_strs"] == tiny_tokenizer().convert_ids_to_tokens(found["tokens"])


def test_messages_are_encoded_as_for_an_answer(http: httpx.Client, server: Running) -> None:
    assert tokens(http, model=NAME, messages=MESSAGES)["tokens"] == tokenizer().apply_chat_template(MESSAGES)
    closed = tokens(http, model=NAME, messages=MESSAGES, add_generation_prompt=False)["tokens"]
    assert closed == tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert tokens(http, model=NAME, messages=MESSAGES, add_special_tokens=True)["tokens"] == [
        *tokenizer().start_ids,
        *tokenizer().apply_chat_template(MESSAGES),
    ]
    opened = [*MESSAGES, {"role": "assistant", "content": "It"}]
    found = tokens(http, model=NAME, messages=opened, continue_final_message=True)["tokens"]
    assert found == tokenizer().apply_chat_template(MESSAGES) + tokenizer().encode("It", add_special_tokens=False)
    developer = [{"role": "developer", "content": [{"type": "text", "text": "Go"}]}]
    assert tokens(http, model=NAME, messages=developer)["tokens"] == tokenizer().apply_chat_template(
        [{"role": "system", "content": "Go"}]
    )


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "run"}},
        {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, "name": "run"}},
        {"function": {"name": "run", "description": None, "parameters": {}, "strict": False}, "type": "function"},
        {"type": "function", "function": {"name": "run", "x-note": [1, {"a": None}]}, "cache_control": {"a": "b"}},
        {"type": "function", "function": {"name": "run", "parameters": {"properties": {"b": {}, "a": {"enum": [1]}}}}},
    ],
    ids=json.dumps,
)
def test_tools_and_variables_reach_the_template_as_they_are_sent(http: httpx.Client, tool: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "The fox runs"}]
    wanted = byte_level(HERMES).apply_chat_template(
        messages, tools=[tool], enable_thinking=True, add_generation_prompt=True, return_dict=False
    )
    body = {"model": "hermes", "messages": messages, "tools": [tool], "chat_template_kwargs": {"enable_thinking": True}}
    assert tokens(http, **body)["tokens"] == wanted


def test_ids_are_decoded_with_special_tokens(http: httpx.Client) -> None:
    ids = tokenizer().apply_chat_template(MESSAGES)
    answer = http.post("/detokenize", json={"model": NAME, "tokens": ids})
    assert answer.status_code == 200
    assert answer.json() == {"prompt": tokenizer().decode(ids, False)}
    assert http.post("/detokenize", json={"model": NAME, "tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {"model": NAME}, None),
        ("tokenize", {"model": NAME, "prompt": "a", "messages": MESSAGES}, None),
        ("tokenize", {"model": "other", "prompt": "a"}, "model"),
        ("tokenize", {"prompt": "a"}, "model"),
        ("tokenize", {"model": NAME, "prompt": 1}, "prompt"),
        ("tokenize", {"model": NAME, "prompt": "a", "x": 1}, "x"),
        (
            "tokenize",
            {"model": NAME, "messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ("tokenize", {"model": NAME, "messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("tokenize", {"model": NAME, "messages": MESSAGES, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("tokenize", {"model": "mute", "messages": MESSAGES}, "messages"),
        ("detokenize", {"model": NAME, "tokens": [10**6]}, "tokens"),
        ("detokenize", {"model": NAME, "tokens": [-1]}, "tokens[0]"),
        ("detokenize", {"tokens": [1]}, "model"),
    ],
)
def test_wrong_requests_are_refused_by_field(http: httpx.Client, path: str, body: Any, param: str | None) -> None:
    answer = http.post(f"/{path}", json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param, answer.text
