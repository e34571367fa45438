"""Reasoning of models through the official client: split from answers, switched by the template, before grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import Stage, reasoning_format
from draftree.serve.tools.parser import joined
from scripted import CHANNELS, OPENED, REASONING, SWITCHED, scripted
from serving import Running, running_server

ASK: Any = [{"role": "user", "content": "2+2?"}]
THOUGHTS, ANSWER = 'Two and two: "4".\nSo {"sum": 4}?', '{"sum": 4}'
BLOCK = f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}"
CHANNELLED = f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}"
CALL = (
    f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    f'<|constrain|>json<|message|>{{"a": 2}}<|call|>'
)
MODELS = {
    "block": (BLOCK, REASONING),
    "opened": (BLOCK, OPENED),
    "switched": (BLOCK, SWITCHED),
    "channels": (CHANNELLED, CHANNELS),
    "calling": (CALL, CHANNELS),
}
SPLIT = ("block", "opened", "switched", "channels")
SCHEMA: Any = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
OTHER: Any = {"type": "function", "function": {"name": "stop"}}
STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
CONSTANT = {"type": "object", "properties": {"b": {"const": 3}}, "required": ["b"], "additionalProperties": False}
TWO: Any = {"type": "function", "function": {"name": "add", "parameters": CONSTANT, "strict": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    models = [ServedModel(name, AsyncLLM(draft="ngram", **scripted(*made))) for name, made in MODELS.items()]
    with running_server(models) as running:
        yield running


@pytest.mark.parametrize("model", SPLIT)
def test_reasoning_is_apart_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=ASK, temperature=0)
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.reasoning, message.content) == (THOUGHTS, THOUGHTS, ANSWER)
    details = whole.usage and whole.usage.completion_tokens_details
    assert details
    assert whole.usage
    assert 0 < (details.reasoning_tokens or 0) < whole.usage.completion_tokens
    reasoning = content = ""
    for chunk in client.chat.completions.create(model=model, messages=ASK, temperature=0, stream=True):
        delta: Any = chunk.choices[0].delta
        assert not (content and getattr(delta, "reasoning", None))
        reasoning += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
    assert (reasoning, content) == (THOUGHTS, ANSWER)


@pytest.mark.parametrize("model", SPLIT)
def test_log_probabilities_come_with_the_text_of_their_tokens(client: openai.OpenAI, model: str) -> None:
    chunks = client.chat.completions.create(model=model, messages=ASK, temperature=0, stream=True, logprobs=True)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    answering = [choice for choice in choices if choice.delta.content and choice.logprobs]
    tokens = [entry.token for choice in answering for entry in (choice.logprobs and choice.logprobs.content) or []]
    assert "".join(tokens).startswith(ANSWER)
    streamed = [entry for choice in choices for entry in (choice.logprobs and choice.logprobs.content) or []]
    (whole,) = client.chat.completions.create(model=model, messages=ASK, temperature=0, logprobs=True).choices
    assert whole.logprobs
    assert streamed == whole.logprobs.content
    response = client.responses.create(model=model, input=ASK, temperature=0, include=["message.output_text.logprobs"])
    assert [item.type for item in response.output] == ["reasoning", "message"]
    message: Any = response.output[1]
    assert "".join(entry.token for entry in message.content[0].logprobs).startswith(ANSWER)


def test_a_text_that_ends_in_its_reasoning_has_no_content(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(model="block", messages=ASK, temperature=0, max_tokens=9).choices
    message: Any = choice.message
    assert message.content is None
    assert THOUGHTS.startswith(message.reasoning)
    assert choice.finish_reason == "length"


@pytest.mark.parametrize(
    ("template", "stage", "text", "reasoning", "content"),
    [
        (REASONING, Stage.BEFORE, "\n<think>\na <b>\n</think>\n\nc</think>", "a <b>", "c</think>"),
        (REASONING, Stage.BEFORE, " <thin> is text", "", " <thin> is text"),
        (REASONING, Stage.BEFORE, "text <think>a</think>", "", "text <think>a</think>"),
        (REASONING, Stage.INSIDE, "a\n\n b </thin", "a\n\n b </thin", ""),
        (REASONING, Stage.AFTER, "<think>text", "", "<think>text"),
        (REASONING, Stage.BEFORE, "<think>\n\n</think>\n\nb", "", "b"),
        ("[/THINK]", Stage.BEFORE, "[THINK]a[/THINK] b", "a", "b"),
        (CHANNELS, Stage.BEFORE, "no header", "", "no header"),
        (CHANNELS, Stage.BEFORE, "<|channel|>analysis<|message|>a<|end|><|start|>assist", "a", ""),
        (CHANNELS, Stage.BEFORE, "<|channel|>commentary<|message|>a<|end|>", "", "a"),
        (CHANNELS, Stage.BEFORE, "<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}"),
    ],
)
def test_any_split_of_a_text_gives_the_same_reasoning(
    template: str, stage: Stage, text: str, reasoning: str, content: str
) -> None:
    form = reasoning_format(template)
    assert form is not None
    for size in (1, 2, 3, 7, len(text)):
        splitter = form.splitter(stage, ())
        deltas = [delta for place in range(0, len(text), size) for delta in splitter.push(text[place : place + size])]
        deltas += splitter.finish()
        assert joined(deltas, "reasoning") == reasoning
        assert joined(deltas, "text") == content


def test_reasoning_can_be_left_out(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="block", messages=ASK, temperature=0, extra_body={"include_reasoning": False}
    )
    assert found.choices[0].message.model_dump(exclude_none=True) == {"role": "assistant", "content": ANSWER}


@pytest.mark.parametrize(
    ("fields", "has_reasoning", "prompt"),
    [
        ({}, True, ""),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False, ""),
        ({"extra_body": {"enable_thinking": False}}, False, ""),
        ({"reasoning_effort": "none"}, False, ""),
        ({"reasoning_effort": "high"}, True, "Effort: high"),
    ],
)
def test_effort_goes_to_templates_that_read_it(
    client: openai.OpenAI, fields: Any, has_reasoning: bool, prompt: str
) -> None:
    found = client.chat.completions.create(model="switched", messages=ASK, temperature=0, **fields)
    plain = client.chat.completions.create(model="switched", messages=ASK, temperature=0)
    message: Any = found.choices[0].message
    if not prompt:
        assert (getattr(message, "reasoning", None) is not None) == has_reasoning
        assert message.content == ANSWER
    assert found.usage
    assert plain.usage
    assert (found.usage.prompt_tokens > plain.usage.prompt_tokens) == bool(prompt or not has_reasoning)


@pytest.mark.parametrize("model", SPLIT)
def test_responses_have_a_reasoning_item(client: openai.OpenAI, model: str) -> None:
    whole = client.responses.create(model=model, input="2+2?", temperature=0)
    reasoning, message = whole.output
    assert reasoning.type == "reasoning"
    assert reasoning.content
    assert reasoning.content[0].text == THOUGHTS
    assert (message.type, whole.output_text) == ("message", ANSWER)
    assert whole.usage
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(model=model, input="2+2?", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(one.delta for one in events if one.type == "response.reasoning_text.delta") == THOUGHTS
    assert [one.text for one in events if one.type == "response.reasoning_text.done"] == [THOUGHTS]
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output_text == ANSWER


def test_reasoning_items_are_read_back(client: openai.OpenAI) -> None:
    first = client.responses.create(model="block", input="2+2?", temperature=0)
    items: Any = [{"role": "user", "content": "2+2?"}, *first.output, {"role": "user", "content": "3+3?"}]
    second = client.responses.with_raw_response.create(model="block", input=items, temperature=0)
    assert "warning" not in second.headers
    assert second.parse().output_text == ANSWER


@pytest.mark.parametrize("fields", [{"response_format": FORMAT}, {"extra_body": {"guided_regex": r'\{"sum": \d\}'}}])
@pytest.mark.parametrize("model", SPLIT)
def test_a_grammar_begins_after_the_reasoning(client: openai.OpenAI, model: str, fields: Any) -> None:
    found = client.chat.completions.create(model=model, messages=ASK, temperature=0, **fields)
    message: Any = found.choices[0].message
    assert (message.reasoning, message.content) == (THOUGHTS, ANSWER)
    assert found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("model", ["block", "opened", "channels"])
def test_the_end_of_reasoning_inside_a_draft_changes_no_text(model: str) -> None:
    drafts = ("prediction", "ngram", "suffix")
    served = AsyncLLM(draft=drafts, plan="fixed", **scripted(*MODELS[model], certainty=9.0))
    fields = {"messages": ASK, "max_tokens": 200, "response_format": FORMAT}
    # the prediction goes past the end of the reasoning
    predicted = {"prediction": {"type": "content", "content": MODELS[model][0]}}
    answered = 0
    with running_server([ServedModel("m", served)]) as running, httpx.Client(base_url=running.url) as http:
        for seed in range(6):
            texts = []
            for draft in ("none", *drafts):
                body = {**fields, "seed": seed, "draft": draft, **(predicted if draft == "prediction" else {})}
                found = http.post("/v1/chat/completions", json=body, timeout=600).json()
                texts.append(found["choices"][0])
            message = texts[0]["message"]
            assert [one["message"] for one in texts if one["message"] != message] == []
            if texts[0]["finish_reason"] == "stop":
                assert isinstance(json.loads(message["content"])["sum"], int)
                answered += 1
    assert answered


def test_calls_of_channels(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="calling", messages=ASK, tools=[TOOL], temperature=0)
    (choice,) = whole.choices
    message: Any = choice.message
    (call,) = message.tool_calls
    assert (message.reasoning, message.content, choice.finish_reason) == (THOUGHTS, None, "tool_calls")
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 2}')


@pytest.mark.parametrize("model", ["block", "channels"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_forced_call_comes_after_the_reasoning(client: openai.OpenAI, model: str, choice: Any) -> None:
    (found,) = client.chat.completions.create(
        model=model, messages=ASK, tools=[TOOL, OTHER], tool_choice=choice, temperature=0
    ).choices
    message: Any = found.message
    assert (message.reasoning, message.content) == (THOUGHTS, None)
    assert message.tool_calls[0].function.name == "add" or choice == "required"


@pytest.mark.parametrize("format_", [None, FORMAT])
def test_strict_calls_of_channels_leave_the_answer_free(client: openai.OpenAI, format_: Any) -> None:
    fields: Any = {"messages": ASK, "tools": [STRICT, OTHER], "temperature": 0}
    if format_ is not None:
        fields["response_format"] = format_
    answer = client.chat.completions.with_raw_response.create(model="channels", **fields)
    assert "warning" not in answer.headers
    assert answer.parse().choices[0].message.content == ANSWER
    (choice,) = client.chat.completions.create(model="calling", **fields).choices
    (call,) = choice.message.tool_calls or ()
    assert call.function.arguments == '{"a": 2}'  # type: ignore[union-attr]
    (choice,) = client.chat.completions.create(model="calling", **{**fields, "tools": [TWO]}).choices
    (call,) = choice.message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"b": 3}  # type: ignore[union-attr]


def test_the_grammar_prefix_of_the_library() -> None:
    prefix = 'root ::= reasoning "</think>" [ \\n]{0,4}\nreasoning ::= TagDispatch(excludes=("</think>"))\n'
    params = SamplingParams(json_schema=SCHEMA, grammar_prefix=prefix, temperature=0, max_tokens=None)
    llm = LLM(draft="ngram", **scripted(BLOCK))
    (done,) = llm.chat(ASK, params)
    assert done.text == BLOCK
    with pytest.raises(InvalidRequestError, match="set one of them") as caught:
        llm.chat(ASK, SamplingParams(grammar_prefix=prefix))
    assert caught.value.param == "grammar_prefix"
