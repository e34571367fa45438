"""/v1/responses through the official client: texts, typed events, calls of tools, and refusals by field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from draftree import SamplingParams
from draftree.serve.server import ResponseStore
from serving import NAME, Running, plain_llm
from tool_templates import TEMPLATES

PROMPT = "The quick brown fox"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture
def server(families: Running) -> Running:
    return families


def ask(client: openai.OpenAI, **given: Any) -> Any:
    extra = {"seed": 7, **given.pop("extra_body", {})}
    fields = {"model": NAME, "input": PROMPT, "max_output_tokens": 24, **given}
    return client.responses.create(**fields, extra_body=extra)


def expected(messages: Any, **given: Any) -> Any:
    return plain_llm().chat(messages, SamplingParams(**{"max_tokens": 24, "seed": 7, **given}))[0]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_text_equals_the_librarys(client: openai.OpenAI) -> None:
    answer = ask(client)
    done = expected([user(PROMPT)])
    assert answer.output_text == done.text
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.model, answer.store) == ("response", "incomplete", NAME, True)
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == len(done.token_ids) == 24
    assert answer.usage.total_tokens == answer.usage.input_tokens + 24
    assert answer.metrics["speculative_decoding"]["num_spec_steps"] > 0
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")


def test_items_and_instructions_are_a_conversation(client: openai.OpenAI) -> None:
    first = ask(client, instructions="Be brief.")
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "The quick"}, {"type": "input_text", "text": "fox"}],
        },
        *(item.model_dump() for item in first.output),
        {"role": "developer", "content": "Go on."},
    ]
    answer = ask(client, instructions="Be brief.", input=items)
    messages = [
        {"role": "system", "content": "Be brief."},
        user("The quick\nfox"),
        {"role": "assistant", "content": first.output_text},
        {"role": "system", "content": "Go on."},
    ]
    assert answer.output_text == expected(messages).text


def test_sampling_and_drafting_fields_are_honoured(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0, extra_body={"draft": "none", "repetition_penalty": 1.5})
    assert answer.output_text == expected([user(PROMPT)], temperature=0, repetition_penalty=1.5).text
    assert not hasattr(answer, "metrics")
    assert answer.temperature == 0


def test_the_stream_has_typed_events_in_order(client: openai.OpenAI) -> None:
    events = list(ask(client, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert text == events[-4].text == last.output_text == expected([user(PROMPT)]).text
    assert events[0].response.status == "in_progress"
    assert last.usage.output_tokens == 24
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_the_clients_stream_helper_reads_the_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model=NAME, input=PROMPT, max_output_tokens=24, extra_body={"seed": 7}) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"


def test_events_have_names_on_the_wire(http: httpx.Client) -> None:
    body = {"model": NAME, "input": PROMPT, "max_output_tokens": 4, "stream": True}
    blocks = http.post("/v1/responses", json=body).text.strip().split("\n\n")
    for block in blocks:
        name, data = block.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


def test_logprobs_come_with_the_text(client: openai.OpenAI) -> None:
    wanted: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = ask(client, **wanted).output[0].content[0].logprobs
    assert len(whole) == 24
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in whole)
    events = list(ask(client, **wanted, stream=True))
    streamed = [e for event in events if event.type == "response.output_text.delta" for e in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]


def test_a_text_that_ends_by_itself_is_completed(client: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "answer", "schema": {"enum": ["yes", "no"]}}}
    answer = ask(client, text=text)
    assert json.loads(answer.output_text) in ("yes", "no")
    assert (answer.status, answer.incomplete_details) == ("completed", None)
    assert answer.text.format.type == "json_schema"
    assert list(ask(client, text=text, stream=True))[-1].type == "response.completed"


def test_pieces_and_rounds_are_reported(client: openai.OpenAI) -> None:
    options = {"draftree": {"pieces": True, "rounds": True}}
    events = list(ask(client, stream=True, extra_body=options))
    reports = [event.draftree for event in events if event.type == "response.draftree"]
    pieces = [piece for report in reports for piece in report["pieces"]]
    assert "".join(piece["text"] for piece in pieces) == events[-1].response.output_text
    assert all(piece["origin"] in ("drafted", "target") for piece in pieces)
    assert any(report["rounds"] for report in reports)
    assert events[-1].response.draftree["stats"]


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_forced_call_is_an_item_of_its_own(client: openai.OpenAI, family: str) -> None:
    named: Any = {"type": "function", "name": "get_weather"}
    fields: Any = {"model": family, "tools": [TOOL], "tool_choice": named, "max_output_tokens": None}
    answer = ask(client, **fields)
    (call,) = answer.output
    assert (call.type, call.name, call.status, answer.status) == (
        "function_call",
        "get_weather",
        "completed",
        "completed",
    )
    arguments = json.loads(call.arguments)
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9
    events = list(ask(client, **fields, stream=True))
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added"
    assert set(kinds[3:-3]) == {"response.function_call_arguments.delta"}
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == events[-3].arguments == call.arguments
    assert pieces
    last = events[-1].response
    assert [item.name for item in last.output] == ["get_weather"]
    assert last.output[0].call_id == events[2].item.call_id
    assert last.tools[0].name == "get_weather"


def test_results_of_calls_are_read(client: openai.OpenAI) -> None:
    fields: Any = {"model": "hermes", "tools": [{**TOOL, "strict": False}]}
    call = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome"}'}
    items = [user("Weather?"), call, {"type": "function_call_output", "call_id": "c1", "output": "18 degrees"}]
    longer = ask(client, **fields, input=items).usage.input_tokens
    assert longer > ask(client, **fields, input=items[:1]).usage.input_tokens + 20


LENIENT: dict[str, Any] = {"tools": [{**TOOL, "strict": False}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"n": 2}, "n"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["reasoning.encrypted"]}, "include[0]"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"draft": "other"}, "draft"),
        ({"unknown": 1}, "unknown"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "model": "hermes"}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}], "model": "hermes"}, "tools[0].name"),
        ({**LENIENT, "model": "hermes", "include": ["message.output_text.logprobs"]}, "include"),
    ],
)
def test_what_is_not_supported_is_refused_by_field(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        body = {"model": NAME, "input": PROMPT, "stream": stream, **fields}
        answer = http.post("/v1/responses", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_refusal_names_the_parts_that_a_content_may_have(http: httpx.Client) -> None:
    file = {"type": "input_file", "file_id": "x"}
    for item, kinds in (
        ({"type": "function_call_output", "call_id": "a", "output": [file]}, "input_text, input_image"),
        ({"role": "user", "content": [file]}, "input_text, input_image"),
        ({"role": "assistant", "content": [file]}, "input_text, output_text"),
    ):
        answer = http.post("/v1/responses", json={"model": NAME, "input": [item]})
        assert answer.status_code == 400
        assert f"must be one of the supported parts: {kinds}" in answer.json()["error"]["message"]


def test_neutral_values_are_accepted(client: openai.OpenAI) -> None:
    answer = ask(
        client, store=False, background=False, truncation="disabled", parallel_tool_calls=True, metadata={"a": "b"}
    )
    assert answer.metadata == {"a": "b"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_continues_a_stored_one(client: openai.OpenAI, stream: bool) -> None:
    items: Any = [{"role": "user", "content": "One?"}]
    fields: Any = {"model": NAME, "extra_body": {"seed": 1}, "max_output_tokens": 6}
    previous = None
    for question in ("Two?", "Three?", "Four?"):
        given: Any = {"instructions": f"After {question}", **fields}
        whole = client.responses.create(input=items, **given, store=False)
        one: Any = {"input": items[-1:], "previous_response_id": previous, **given}
        *_, last = client.responses.create(**one, stream=True) if stream else [client.responses.create(**one)]
        answer = last.response if stream else last
        assert (answer.output_text, answer.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
        assert answer.previous_response_id == previous
        counted = client.responses.input_tokens.count(
            model=NAME, input=items[-1:], previous_response_id=previous, instructions=given["instructions"]
        )
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", whole.usage.input_tokens)
        previous = answer.id
        items += [*answer.output, {"role": "user", "content": question}]
    references: Any = [{"type": "item_reference", "id": item.id} if hasattr(item, "id") else item for item in items]
    referring = client.responses.create(input=references, **fields)
    assert referring.usage.input_tokens == client.responses.create(input=items, **fields).usage.input_tokens
    for wrong, message in ((references * 2, "named twice"), ([*references, references[1] | {"id": "msg_0"}], "stored")):
        with pytest.raises(openai.BadRequestError, match=message) as raised:
            client.responses.create(input=wrong, **fields)
        assert (raised.value.param or "").endswith("].id")
    with pytest.raises(openai.BadRequestError, match="is not stored") as raised:
        client.responses.create(input="Five?", previous_response_id=whole.id, **fields)
    assert (raised.value.param, raised.value.code) == ("previous_response_id", "previous_response_not_found")


def test_ids_of_a_replica_end_with_its_name(
    client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.server.responses, "suffix", "-abc")
    answer = client.responses.create(model=NAME, input="Two?", max_output_tokens=3)
    assert [name.rpartition("-")[2] for name in (answer.id, *(item.id or "" for item in answer.output))] == ["abc"] * 2
    client.responses.create(model=NAME, input="Three?", previous_response_id=answer.id, max_output_tokens=3)


def test_stored_responses_are_bounded_and_belong_to_a_key() -> None:
    store = ResponseStore(max_bytes=100)
    items = [{"role": "user", "content": "a" * 10}]
    for name in ("a", "b"):
        store.put("me", name, items)
    assert store.get("me", "a") == items  # used later than b
    store.put("me", "c", items)
    assert [store.get("me", name) is not None for name in "abc"] == [True, False, True]
    assert store.get("you", "a") is None
    store.put("me", "d", items * 10)
    assert [store.get("me", name) is not None for name in "acd"] == [True, True, False]
    store.put("me", "e", [{"id": "item"}])
    assert store.item("me", "item") == {"id": "item"}
    assert store.item("you", "item") is None
    for name in "fg":
        store.put("me", name, items)
    assert store.item("me", "item") == {"id": "item"}  # as it was used
    for name in "hij":
        store.put("me", name, items)
    assert store.item("me", "item") is None
