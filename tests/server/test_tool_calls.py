"""Calls of tools through the official client: every family's format, forced and streamed, and a real model."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftree import AsyncLLM
from draftree.serve.pool import ServedModel
from real_weights import folder_of
from serving import Running, running_server
from text_backends import byte_level
from tool_templates import HERMES, TEMPLATES

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def server(families: Running) -> Running:
    return families


def ask(client: openai.OpenAI, family: str = "hermes", **given: Any) -> Any:
    backend = byte_level()
    ends = {backend.eos_token_id: 5.0, **dict.fromkeys(backend.encode('"}', add_special_tokens=False), 4.0)}
    messages: Any = [{"role": "user", "content": "How is Paris?"}]
    fields = {"messages": messages, "tools": TOOLS, "seed": 7, "logit_bias": ends, **given}
    return client.chat.completions.create(model=family, **fields)


@pytest.mark.parametrize("family", [*TEMPLATES, "toolless"])
def test_the_client_gets_calls_whole_and_streamed(client: openai.OpenAI, family: str) -> None:
    (choice,) = ask(client, family, tool_choice=NAMED).choices
    assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", "")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    arguments, ids, names, reasons = "", [], [], []
    for chunk in ask(client, family, tool_choice=NAMED, stream=True):
        (streamed,) = chunk.choices
        assert not streamed.delta.content
        reasons += [streamed.finish_reason] if streamed.finish_reason else []
        parts = streamed.delta.tool_calls or []
        assert len(parts) <= 1  # of several, many clients read the first only
        for part in parts:
            assert part.index == 0
            ids += [part.id] if part.id else []
            names += [part.function.name] if part.function.name else []
            arguments += part.function.arguments or ""
    assert (names, reasons, len(ids)) == (["get_weather"], ["tool_calls"], 1)
    assert arguments == call.function.arguments


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', '{"city": "', "", "[1]"])
@pytest.mark.parametrize("family", [*TEMPLATES, "toolless"])
def test_calls_and_results_are_read_back(client: openai.OpenAI, family: str, arguments: str) -> None:
    function = {"name": "get_weather", "arguments": arguments}
    history: Any = [
        {"role": "user", "content": "How is Rome?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "18 degrees"},
    ]
    first = ask(client, family, messages=history[:1], tool_choice="none", max_tokens=1)
    answer = ask(client, family, messages=history, tool_choice="none", max_tokens=8)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > first.usage.prompt_tokens + 20


def test_several_texts_have_calls_of_their_own(client: openai.OpenAI) -> None:
    answer = ask(client, tool_choice=NAMED, n=3)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_the_model_decides(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice="auto", max_tokens=6, logit_bias={}).choices
    assert choice.message.content
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": NAMED, "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ],
)
def test_refusals(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **fields)
    assert raised.value.param == param


@pytest.mark.weights
def test_a_real_model_calls_with_the_city_of_the_question_and_reads_the_result() -> None:
    folder = folder_of("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # the model's own template reads no tools
    tokenizer.chat_template = HERMES
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    parameters = PARAMETERS | {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    fields: Any = {
        "model": "real",
        "tools": [{"type": "function", "name": "get_weather", "parameters": parameters, "strict": True}],
        "temperature": 0,
        "max_output_tokens": 60,
        "parallel_tool_calls": False,
    }
    with (
        running_server([ServedModel("real", AsyncLLM(model, "ngram", tokenizer=tokenizer))]) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for draft in ("none", "ngram"):
            items: Any = [{"role": "user", "content": "What is the weather like in Paris today?"}]
            fields["extra_body"] = {"draft": draft}
            answer = client.responses.create(input=items, tool_choice="required", **fields)
            (call,) = answer.output
            assert json.loads(call.arguments) == {"city": "Paris"}
            items += [item.model_dump() for item in answer.output]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny, 18 degrees"})
            final = client.responses.create(input=items, tool_choice="none", **fields)
            assert "sunny" in final.output_text.lower()


class Person(pydantic.BaseModel):
    name: str
    mail: pydantic.HttpUrl | None
    colours: set[Literal["red"]]


@pytest.mark.parametrize("family", ["hermes", "qwen3-coder"])
def test_what_no_grammar_enforces_of_arguments_is_named_and_checked(http: httpx.Client, family: str) -> None:
    unique = {"type": "array", "items": {"const": 1}, "uniqueItems": True, "minItems": 2, "maxItems": 2}
    parameters = {"type": "object", "properties": {"a": unique}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"model": family, "messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 200}
    answer = http.post("/v1/chat/completions", json={**body, "tool_choice": "required", "parallel_tool_calls": False})
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": [1, 1]}
    place = "'uniqueItems' at #/properties/a"
    first, second = answer.headers.get_list("warning")
    assert f"'tools[0].function.parameters' is not enforced in part: {place}" in first
    assert f"a call of 'f' breaks its schema: {place}" in second


@pytest.mark.parametrize("family", TEMPLATES)
def test_no_tools_and_strict_tools_are_accepted(client: openai.OpenAI, family: str) -> None:
    """A strict tool is what `pydantic_function_tool` makes."""
    assert ask(client, family, tools=[], tool_choice="auto", max_tokens=4).choices[0].finish_reason == "length"
    strict = [openai.pydantic_function_tool(Person)]
    assert ask(client, family, tools=strict, max_tokens=20).choices[0].message.content
