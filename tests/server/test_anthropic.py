"""Anthropic's protocol: the same answers as chat completions, in its messages and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from draftree import AsyncLLM
from draftree.serve.access import KeyRing
from draftree.serve.pool import ServedModel
from draftree.serve.records import ApiKey
from scripted import REASONING, scripted
from serving import Running, running_server
from tool_templates import HERMES

THOUGHTS, ANSWER = "Rome is\n\nmild.", "It is 18 degrees."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MODELS = {
    "plain": (ANSWER, HERMES),
    "thinking": (f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}", REASONING),
    "calling": (f"<think>\n{THOUGHTS}\n</think>\n\nI look.\n{CALL}", REASONING),
}
ASK = [{"role": "user", "content": "How is Rome?"}]
TOOL = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    models = [ServedModel(name, AsyncLLM(draft="ngram", **scripted(*made))) for name, made in MODELS.items()]
    with running_server(models) as running:
        yield running


def body(model: str = "plain", **fields: Any) -> dict[str, Any]:
    return {"model": model, "max_tokens": 200, "messages": ASK, "temperature": 0, **fields}


def ask(http: httpx.Client, model: str = "plain", **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/messages", json=body(model, **fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(http: httpx.Client, model: str = "plain", **fields: Any) -> list[dict[str, Any]]:
    with http.stream("POST", "/v1/messages", json=body(model, stream=True, **fields)) as answer:
        blocks = answer.read().decode().strip().split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream describe."""
    message = events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            (block,), delta = message["content"][event["index"] :], event["delta"]
            kind = delta.pop("type").removesuffix("_delta")
            (key, piece), *_ = delta.items()
            block[key] = block.get(key, "") + piece
            assert kind == {"thinking": kind, "text": "text", "tool_use": "input_json"}[block["type"]]
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json", "{}"))
    assert events[-1] == {"type": "message_stop"}
    return message


def test_a_text(http: httpx.Client) -> None:
    found = ask(http, system="Be brief.")
    assert found["content"] == [{"type": "text", "text": ANSWER}]
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "plain")
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    chat = {"model": "plain", "messages": [{"role": "system", "content": "Be brief."}, *ASK], "temperature": 0}
    usage = http.post("/v1/chat/completions", json=chat).json()["usage"]
    assert found["usage"]["output_tokens"] == usage["completion_tokens"]
    assert found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"] == usage["prompt_tokens"]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 4}, {"stop_sequences": ["18"]}, {"tools": [TOOL]}])
@pytest.mark.parametrize("model", MODELS)
def test_the_events_of_a_stream_make_the_message(http: httpx.Client, model: str, fields: dict[str, Any]) -> None:
    ask(http, model, **fields)  # so that both find the same cached prefix
    whole, stream = ask(http, model, **fields), folded(streamed(http, model, **fields))
    for message in (stream, whole):
        for one in (message, *message["content"]):
            one.pop("id", None)  # new ones in each response
    assert stream == whole


def test_thinking_and_calls_are_blocks(http: httpx.Client) -> None:
    found = ask(http, "calling", tools=[TOOL])
    thinking, text, call = found["content"]
    assert thinking == {"type": "thinking", "thinking": THOUGHTS, "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rome"})
    assert found["stop_reason"] == "tool_use"
    omitted = ask(http, "calling", tools=[TOOL], thinking={"type": "adaptive", "display": "omitted"})
    assert [block["type"] for block in omitted["content"]] == ["text", "tool_use"]


def test_a_forced_call(http: httpx.Client) -> None:
    found = ask(http, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}, max_tokens=400, seed=1)
    assert found["content"][0]["name"] == "weather"


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [({"max_tokens": 3}, "max_tokens", None), ({"stop_sequences": ["18"]}, "stop_sequence", "18")],
)
def test_why_a_text_ended(http: httpx.Client, fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    found = ask(http, **fields)
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
    assert ANSWER.startswith(found["content"][0]["text"])


def test_a_schema_and_a_prefix_of_the_answer(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    found = ask(http, "thinking", output_config={"format": {"type": "json_schema", "schema": schema}})
    assert [block.get("text") for block in found["content"]] == [None, '{"a": 1}']
    begun = [*ASK, {"role": "assistant", "content": ANSWER[:6]}]
    assert ask(http, messages=begun)["content"] == [{"type": "text", "text": ANSWER[6:]}]


def test_calls_and_results_are_read_back_and_counted(http: httpx.Client) -> None:
    answer = ask(http, "calling", tools=[TOOL])
    result = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "18 degrees"}]},
        {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
    ]
    history = [*ASK, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": result}]
    found = ask(http, "calling", tools=[TOOL], messages=history)
    counted = http.post("/v1/messages/count_tokens", json={"model": "calling", "messages": history, "tools": [TOOL]})
    usage = found["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    chat: list[dict[str, Any]] = [
        *ASK,
        {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "18 degrees"},
        {"role": "user", "content": "And now?"},
    ]
    function = {"name": "weather", "description": TOOL["description"], "parameters": TOOL["input_schema"]}
    tokenized = {"model": "calling", "messages": chat, "tools": [{"type": "function", "function": function}]}
    assert http.post("/tokenize", json=tokenized).json()["count"] == counted.json()["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "absent"}, 404, "not_found_error", "absent"),
        ({"stop_sequence": ["a"]}, 400, "invalid_request_error", "did you mean 'stop_sequences'?"),
        ({"stop_sequences": ["a"] * 65}, 400, "invalid_request_error", "stop"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "image"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, 400, "invalid_request_error", "tool_choice.name"),
        ({"temperature": 1e9}, 400, "invalid_request_error", "temperature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_the_shape_of_the_protocol(
    http: httpx.Client, fields: dict[str, Any], status: int, kind: str, words: str, stream: bool
) -> None:
    given = {name: value for name, value in body(stream=stream, **fields).items() if value is not None}
    answer = http.post("/v1/messages", json=given)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert words in error["error"]["message"]


def test_fields_without_effect_are_named(http: httpx.Client) -> None:
    fields = {"metadata": {"user_id": "1"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer = http.post("/v1/messages?beta=true", json=body(**fields))
    assert answer.status_code == 200
    assert all(name in answer.headers["warning"] for name in ("'metadata'", "'budget_tokens'"))


def test_a_limit_of_tokens_beyond_the_context_is_reduced(http: httpx.Client) -> None:
    answer = http.post("/v1/messages", json=body(max_tokens=128_000))
    assert answer.json()["content"] == [{"type": "text", "text": ANSWER}]
    assert "'max_tokens' is reduced" in answer.headers["warning"]


def test_the_key_of_the_protocol() -> None:
    ring = KeyRing({"secret": ApiKey("one")})
    models = [ServedModel("plain", AsyncLLM(**scripted(*MODELS["plain"])))]
    with running_server(models, keys=ring) as running, httpx.Client(base_url=running.url) as http:
        assert http.post("/v1/messages", json=body()).status_code == 401
        assert http.post("/v1/messages", json=body(), headers={"x-api-key": "wrong"}).status_code == 401
        answer = http.post("/v1/messages", json=body(), headers={"x-api-key": "secret"})
        assert answer.status_code == 200
