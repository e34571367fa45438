"""Tools of a request: refusals by field, grammars that force calls, and answers through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.models.table import TableLM, hashed
from draftree.serve.errors import ApiError
from draftree.serve.pool import ServedModel
from draftree.serve.tools.plan import ToolPlan
from grammar_samples import accepts
from serving import Running, running_server, tiny_model
from text_backends import byte_level
from tool_samples import TIME, TOOLS, WEATHER, parsed, plan_of, tokenizer_of
from tool_templates import CHAT_ONLY, TEMPLATES


@pytest.mark.parametrize(
    ("tools", "options", "param"),
    [
        ([], {}, "tools"),
        ("x", {}, "tools"),
        ([{"type": "web_search"}], {}, "tools[0]"),
        ([{"type": "function", "function": {"name": "a b"}}], {}, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a", "x": 1}}], {}, "tools[0].function.x"),
        ([TIME, TIME], {}, "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}], {}, None),
        ([{"type": "function", "function": {"name": "a", "strict": True}}], {}, "tools[0].function.strict"),
        (None, {"tool_choice": "auto"}, "tool_choice"),
        (TOOLS, {"tool_choice": "some"}, "tool_choice"),
        (TOOLS, {"tool_choice": {"type": "function", "function": {"name": "tim"}}}, "tool_choice"),
        (TOOLS, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ],
)
def test_wrong_tools_are_refused_by_field(tools: Any, options: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        ToolPlan.of(tokenizer_of(TEMPLATES["hermes"]), tools, **options)
    assert caught.value.status == 400
    assert caught.value.param == (param or "tools[0].function.parameters")


@pytest.mark.parametrize(
    "template", [CHAT_ONLY, "{{ tools }}{{ messages }}", "{{ tools }}<tool_call>x<arg_key>y", "{{ tools"]
)
def test_templates_without_tools_or_without_a_known_format_refuse_them(template: str) -> None:
    with pytest.raises(ApiError, match="leave 'tools' out") as caught:
        ToolPlan.of(tokenizer_of(template), TOOLS)
    assert caught.value.param == "tools"


def test_without_tools_the_answer_is_text() -> None:
    for plan in (ToolPlan.of(None, None), plan_of("hermes", tool_choice="none")):
        assert not plan.is_active
        assert plan.tools is None
        written = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
        assert parsed(plan, list(written)) == (written, [])


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize(("choice", "is_parallel"), [("required", False), ("required", True), (NAMED, True)])
def test_a_forced_call_follows_the_format_and_the_schema(family: str, choice: Any, is_parallel: bool) -> None:
    plan = plan_of(family, tool_choice=choice, is_parallel=is_parallel)
    schema = WEATHER["function"]["parameters"]
    backend = byte_level(TEMPLATES[family])
    llm = LLM(TableLM(hashed(len(backend), 1)), "ngram", tokenizer=backend)
    done = 0
    for seed in range(12):
        params = plan.sampling(SamplingParams(max_tokens=400, seed=seed, logit_bias=likely_ends(backend)))
        (answer,) = llm.generate("Hi", params)
        text, calls = parsed(plan, [answer.text])
        assert text == ""
        assert calls
        if answer.finish_reason != "stop":
            continue
        done += 1
        assert len(calls) == 1 or (is_parallel and choice == "required")
        for name, arguments in calls:
            assert name == "get_weather" or choice == "required"
            if name == "get_weather":
                jsonschema.validate(json.loads(arguments), schema)
            else:
                assert arguments == "{}"
    assert done >= 3


def likely_ends(backend: Any) -> dict[int, float]:
    return {backend.eos_token_id: 5.0, **dict.fromkeys(backend.encode('"}', add_special_tokens=False), 4.0)}


def test_a_forced_call_excludes_another_format() -> None:
    plan = plan_of("hermes", tool_choice="required")
    with pytest.raises(ApiError) as caught:
        plan.sampling(SamplingParams(regex="a"))
    assert caught.value.param == "tool_choice"


def test_a_schema_that_cannot_be_enforced_is_refused_by_field() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {"type": "null"}}}}
    with pytest.raises(ApiError) as caught:
        ToolPlan.of(tokenizer_of(TEMPLATES["hermes"]), [TIME, tool], tool_choice="required")
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}, "maxLength"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, "b"),
        ({"type": "object", "properties": {"a>": {}}}, "a>"),
        ({"type": "object", "properties": {}, "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "required parameter 'a'"),
    ],
)
def test_the_xml_format_refuses_what_it_cannot_enforce(parameters: Any, words: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ApiError, match=words):
        ToolPlan.of(tokenizer_of(TEMPLATES["qwen3-coder"]), [tool], tool_choice="required")


def test_forced_xml_has_bare_text_and_json() -> None:
    properties = {"text": {"type": "string"}, "list": {"type": "array", "items": {"type": "integer"}}, "any": {}}
    parameters = {"type": "object", "properties": properties, "required": ["text", "list"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    plan = ToolPlan.of(tokenizer_of(TEMPLATES["qwen3-coder"]), [tool], tool_choice="required")
    written = (
        '<tool_call>\n<function=f>\n<parameter=text>\na < b\n"c"\n</parameter>\n'
        "<parameter=list>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
    )
    assert plan.grammar is not None
    assert accepts(plan.grammar, written)
    assert accepts(plan.grammar, written.replace("</function>", "<parameter=any>\nx\n</parameter>\n</function>"))
    assert not accepts(plan.grammar, written.replace("[1, 2]", "x"))
    assert not accepts(plan.grammar, written.replace('<parameter=text>\na < b\n"c"\n</parameter>\n', ""))
    (call,) = parsed(plan, list(written))[1]
    assert json.loads(call[1]) == {"text": 'a < b\n"c"', "list": [1, 2]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    models = [
        ServedModel(name, AsyncLLM(tiny_model(context=2048), "ngram", tokenizer=byte_level(template)), (), ("ngram",))
        for name, template in TEMPLATES.items()
    ]
    with running_server(models) as running:
        yield running


def ask(client: openai.OpenAI, family: str, **given: Any) -> Any:
    messages: Any = [{"role": "user", "content": "How is Paris?"}]
    fields = {"messages": messages, "tools": TOOLS, "seed": 7, "logit_bias": likely_ends(byte_level()), **given}
    return client.chat.completions.create(model=family, **fields)


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_client_gets_calls_whole_and_streamed(client: openai.OpenAI, family: str) -> None:
    (choice,) = ask(client, family, tool_choice=NAMED).choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    pieces, names, reasons = [], [], []
    for chunk in ask(client, family, tool_choice=NAMED, stream=True):
        (streamed,) = chunk.choices
        reasons += [streamed.finish_reason] if streamed.finish_reason else []
        for part in streamed.delta.tool_calls or []:
            assert part.index == 0
            names += [part.function.name] if part.function.name else []
            pieces.append(part.function.arguments or "")
    assert (names, reasons) == (["get_weather"], ["tool_calls"])
    assert "".join(pieces) == call.function.arguments


@pytest.mark.parametrize("family", TEMPLATES)
def test_calls_and_results_are_read_back(client: openai.OpenAI, family: str) -> None:
    function = {"name": "get_weather", "arguments": json.dumps({"city": "Rome"})}
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
