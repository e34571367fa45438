"""Calls of tools through the official client: forced ones, streamed ones, and answers of tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from draftree import AsyncLLM
from draftree.serve.pool import ServedModel
from serving import NAME, Running, running_server, tiny_model
from text_backends import byte_level
from tool_templates import HERMES

MESSAGES: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    llm = AsyncLLM(tiny_model(context=2048), "ngram", tokenizer=byte_level(HERMES))
    with running_server([ServedModel(NAME, llm)]) as running:
        yield running


def ask(client: openai.OpenAI, **given: Any) -> Any:
    fields = {"model": NAME, "messages": MESSAGES, "max_tokens": 120, "seed": 2, "tools": TOOLS, **given}
    return client.chat.completions.create(**fields)


def check(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    assert name == "weather"
    assert found.keys() == {"city", "days"}
    assert found["city"] in ("Oslo", "Rome")
    assert found["days"] in (1, 2)


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice=NAMED).choices
    (call,) = choice.message.tool_calls
    check(call.function.name, call.function.arguments)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert call.type == "function"


def test_a_streamed_call_equals_the_whole_one(client: openai.OpenAI) -> None:
    (whole,) = ask(client, tool_choice=NAMED).choices
    (expected,) = whole.message.tool_calls
    ids, names, arguments, reasons = [], [], "", []
    for chunk in ask(client, tool_choice=NAMED, stream=True):
        (choice,) = chunk.choices
        reasons += [choice.finish_reason] if choice.finish_reason else []
        assert not choice.delta.content
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            ids += [call.id] if call.id else []
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments or ""
    assert (names, arguments, reasons) == ([expected.function.name], expected.function.arguments, ["tool_calls"])
    assert len(ids) == 1


def test_several_texts_have_calls_of_their_own(client: openai.OpenAI) -> None:
    answer = ask(client, tool_choice=NAMED, n=3)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        check(call.function.name, call.function.arguments)


def test_answers_of_tools_are_part_of_the_conversation(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice=NAMED).choices
    (call,) = choice.message.tool_calls
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    answer = ask(client, messages=history, tool_choice="none", max_tokens=4)
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage.prompt_tokens > ask(client, tool_choice="none", max_tokens=4).usage.prompt_tokens


def test_the_model_decides(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice="auto", max_tokens=6).choices
    assert choice.message.content
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": NAMED, "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ],
)
def test_refusals(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **fields)
    assert raised.value.param == param
