"""Calls of tools: refusals by field, grammars that force calls, and every family's format, parsed in any pieces."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from draftree import LLM, SamplingParams
from draftree.models.table import TableLM, hashed
from draftree.serve.errors import ApiError
from draftree.serve.tools.parser import Delta, JsonScan, State, merged
from draftree.serve.tools.plan import ToolPlan
from draftree.text.tokenizer import Tokenizer
from grammar_samples import accepts
from text_backends import byte_level
from tool_templates import CHAT_ONLY, TEMPLATES

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Rome", "12"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
PARIS = {"city": "Paris", "unit": "C"}


@functools.cache
def tokenizer_of(template: str) -> Tokenizer:
    return Tokenizer(byte_level(template), name="tiny")


def plan_of(family: str, **options: Any) -> ToolPlan:
    return ToolPlan.of(tokenizer_of(TEMPLATES[family]), TOOLS, **options)


def parsed(plan: ToolPlan, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer, and the names and arguments of its calls."""
    parser = plan.parser()
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.push(piece)
    deltas += parser.finish()
    text, calls = "", []
    for delta in deltas:
        if delta.kind == "text":
            text += delta.text
        elif delta.name is not None:
            assert delta.id
            assert delta.index == len(calls)
            calls.append([delta.name, delta.text])
        else:
            assert delta.id is None
            calls[delta.index][1] += delta.text
    assert parser.num_calls == len(calls)
    return text, [(name, arguments) for name, arguments in calls]


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "C"}}\n</tool_call>',
    "llama": '{"name": "get_weather", "parameters": {"city": "Paris", "unit": "C"}}',
    "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "unit": "C"}}]',
    "qwen3-coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>"
    ),
}
SECOND = {
    "hermes": '\n<tool_call>\n{"arguments": {}, "name": "time"}\n</tool_call>',
    "llama": '; {"name": "time", "parameters": {}}',
    "mistral": "[TOOL_CALLS]time[ARGS]{}",
    "qwen3-coder": "\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_several_calls_are_parsed_or_limited_to_one(family: str) -> None:
    plan, written = plan_of(family), WRITTEN[family] + SECOND[family]
    assert plan.family is not None
    assert plan.family.name == family
    _, calls = parsed(plan, [written])
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", PARIS), ("time", {})]
    text, calls = parsed(plan_of(family, is_parallel=False), [written + " and text"])
    assert (text, [name for name, _ in calls]) == ("", ["get_weather"])


def test_a_list_of_calls_is_parsed() -> None:
    written = '[TOOL_CALLS][{"name": "time", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "P"}}]'
    assert [name for name, _ in parsed(plan_of("mistral"), [written])[1]] == ["time", "get_weather"]
    written = '<tool_call>[{"name": "time"}, {"name": "time"}]</tool_call>'
    assert parsed(plan_of("hermes"), [written]) == ("", [("time", "{}"), ("time", "{}")])


def test_arguments_arrive_in_pieces_after_the_name() -> None:
    parser = plan_of("hermes").parser()
    assert parser.push('Well.\n<tool_call>\n{"name": "get_weather", "argu') == [Delta("text", "Well.")]
    (first,) = parser.push('ments": {"ci')
    assert first.kind == "call"
    assert (first.index, first.name, first.text) == (0, "get_weather", '{"ci')
    assert parser.push('ty": "Paris"') == [Delta("call", 'ty": "Paris"')]
    assert parser.push("}}\n</tool_call>\n") == [Delta("call", "}")]
    assert parser.finish() == []


def test_ids_of_calls_have_the_length_that_the_template_accepts() -> None:
    for family, length in (("mistral", 9), ("hermes", 29)):
        first = plan_of(family).parser().push(WRITTEN[family])[0]
        assert first.kind == "call"
        assert first.id is not None
        assert len(first.id) == length


@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("hermes", "Plain text, with  spaces.\n\n"),
        ("hermes", "a < b <tool_call"),
        ("hermes", "<tool_call> is the tag"),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"x": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "time", name}</tool_call>'),
        ("hermes", '<tool_call>{"name": "ti'),
        ("hermes", "x</tool_call>"),
        ("llama", '{"city": "Paris", "name": 3}'),
        ("llama", 'Here: {"name": "time", "parameters": {}}'),
        ("llama", "[1, 2]"),
        ("mistral", "[TOOL_CALLS] unknown{}"),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[1, 2]"),
        ("qwen3-coder", "<tool_call>\n<function=unknown>\n</function>"),
        ("qwen3-coder", "<tool_call>\n<functions=time>"),
        ("qwen3-coder", "<tool_call>{}</tool_call>"),
    ],
)
def test_what_is_no_call_stays_text(family: str, written: str) -> None:
    assert parsed(plan_of(family), [written]) == (written, [])
    assert parsed(plan_of(family), list(written)) == (written, [])


def test_arguments_that_break_stay_and_the_rest_is_text() -> None:
    written = '<tool_call>{"name": "time", "arguments": {"a": 1, oops}} end'
    assert parsed(plan_of("hermes"), [written]) == ("oops}} end", [("time", '{"a": 1, ')])


def test_arguments_as_text_are_objects() -> None:
    written = '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert parsed(plan_of("hermes"), [written]) == ("", [("time", '{"a": 1}')])


def test_values_of_the_xml_format_have_the_types_of_the_schema() -> None:
    written = WRITTEN["qwen3-coder"].replace("Paris", "12").replace("\nC\n", "\n</b>\n")
    written = written.replace("<parameter=unit>", "<parameter=days>\n3\n</parameter>\n<parameter=unit>")
    (call,) = parsed(plan_of("qwen3-coder"), [written])[1]
    assert json.loads(call[1]) == {"city": "12", "days": 3, "unit": "</b>"}


def test_special_tokens_are_left_out_where_the_marker_is_one() -> None:
    backend = byte_level(TEMPLATES["mistral"])
    backend.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "[TOOL_CALLS]"]})
    plan = ToolPlan.of(Tokenizer(backend, name="tiny"), TOOLS)
    assert plan.sampling(SamplingParams()).skip_special_tokens is False
    assert parsed(plan, ["Hi <|im_", "end|>there[TOOL_CALLS]", "time{}</s>"]) == ("Hi there", [("time", "{}")])
    assert parsed(plan, ["[TOOL_CALLS]none"]) == ("none", [])
    assert plan_of("hermes").sampling(SamplingParams()).skip_special_tokens is True


SNIPPETS = [
    *WRITTEN.values(),
    *SECOND.values(),
    "Hello. ",
    "\n",
    " ",
    ";",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    '{"name": "time", "arguments": {"a": [1.5e3, true, null, "\\u00e9\\n"]}}',
    '{"name": "time", "arguments": {"a": }}',
    '[{"name": "time"}, ',
    "]",
    "</s>",
    "<|im_",
    "time[ARGS]{}",
]


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("is_parallel", [True, False])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_split_gives_the_same_calls_and_text(family: str, is_parallel: bool, data: st.DataObject) -> None:
    plan = plan_of(family, is_parallel=is_parallel)
    snippets = data.draw(st.lists(st.sampled_from(SNIPPETS), max_size=5))
    written = "".join(snippets)
    if written and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(written) - 1))
        written = written[:place] + data.draw(st.sampled_from(["", "{", '"', "x", "<"])) + written[place + 1 :]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=12)))
    pieces = [written[start:end] for start, end in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    whole = parsed(plan, [written])
    assert parsed(plan, pieces) == whole
    assert parsed(plan, list(written)) == whole
    if not whole[1]:
        assert whole[0] == written


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(JSON, st.data())
def test_the_scan_accepts_json_and_nothing_else(value: Any, data: st.DataObject) -> None:
    written = json.dumps(value, ensure_ascii=data.draw(st.booleans()), indent=data.draw(st.sampled_from([None, 1])))
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(written) - 1))
        written = written[:place] + data.draw(st.sampled_from(list('{}[]",:0e-.tx\\ '))) + written[place + 1 :]
    scan = JsonScan()
    is_json = all(map(scan.push, written + " ")) and scan.state is State.DONE
    try:
        json.loads(written)
    except ValueError:
        assert not is_json
    else:
        assert is_json or "NaN" in written or "Infinity" in written


def test_deltas_of_one_kind_are_joined() -> None:
    begun = Delta("call", id="x", name="f")
    deltas = [Delta("text", "a"), Delta("text", "b"), begun, Delta("call", "{"), Delta("call", "}")]
    assert merged(deltas) == [Delta("text", "ab"), Delta("call", "{}", 0, "x", "f")]


@pytest.mark.parametrize(
    ("tools", "options", "param"),
    [
        ("x", {}, "tools"),
        ([{"type": "web_search"}], {}, "tools[0]"),
        ([{"type": "function", "function": {"name": "a b"}}], {}, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a", "parameter": {}}}], {}, "tools[0].function.parameter"),
        ([TIME, TIME], {}, "tools[1].function.name"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}], {}, None),
        ([{"type": "function", "function": {"name": "a", "strict": 1}}], {}, "tools[0].function.strict"),
        (None, {"tool_choice": "required"}, "tool_choice"),
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


@pytest.mark.parametrize("template", ["{{ tools }}{{ messages }}", "{{ tools }}<tool_call>x<arg_key>y"])
def test_templates_without_a_known_format_refuse_tools(template: str) -> None:
    with pytest.raises(ApiError, match="leave 'tools' out") as caught:
        ToolPlan.of(tokenizer_of(template), TOOLS)
    assert caught.value.param == "tools"


def test_a_template_without_tools_gets_them_as_text() -> None:
    plan = ToolPlan.of(tokenizer_of(CHAT_ONLY), [TIME])
    call = {"id": "x", "type": "function", "function": {"name": "time", "arguments": '{"zone": "'}}
    system, asked, answer, result = plan.messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What time?"},
            {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "x", "content": "noon"},
            {"role": "tool", "tool_call_id": "y", "content": "late"},
            {"role": "user", "content": "And?"},
        ],
        CHAT_ONLY,
    )
    assert plan.tools is None
    assert '{"name": "time"}\n' in system["content"]
    assert system["content"].endswith("\n\nBe brief.")
    assert asked == {"role": "user", "content": "What time?"}
    written = '<tool_call>\n{"name": "time", "arguments": {"zone": "}\n</tool_call>'
    assert answer == {"role": "assistant", "content": f"Wait.\n{written}"}
    noon, late = (f"<tool_response>\n{text}\n</tool_response>" for text in ("noon", "late"))
    assert result == {"role": "user", "content": f"{noon}\n{late}\nAnd?"}


def test_without_tools_the_answer_is_text() -> None:
    for plan in (ToolPlan.of(None, None), ToolPlan.of(None, []), plan_of("hermes", tool_choice="none")):
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


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "object", "not": {"type": "object"}}, "no arguments follow the schema"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, "has no target"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "no arguments follow the schema"),
    ],
)
def test_a_schema_that_no_arguments_follow_is_refused_by_field(family: str, parameters: Any, words: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ApiError, match=words) as caught:
        ToolPlan.of(tokenizer_of(TEMPLATES[family]), [TIME, tool], tool_choice="required")
    assert caught.value.param == "tools[1].function.parameters"


VALUES: list[tuple[Any, str, Any, list[str]]] = [
    ({"enum": ["2024", "2025"]}, "2025", "2025", ["2026", '"2025"']),
    ({"enum": ["true", 1, None]}, "true", "true", ["false"]),
    ({"const": "[1]"}, "[1]", "[1]", ["1"]),
    ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, "123", "123", ["1234"]),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "null", None, []),
    ({"allOf": [{"type": "string"}, {"pattern": "^[0-9]+$"}]}, "0123", "0123", ["a", ""]),
    ({"$ref": "#/$defs/id"}, "77", "77", ["a", "777"]),
    ({"type": ["integer", "string"], "maxLength": 2}, "12", 12, ["abc"]),
    ({"type": "string", "format": "date"}, "2024-02-29", "2024-02-29", ["2023-02-29"]),
    ({"type": "array", "items": {"type": "string"}}, '["1", "é"]', ["1", "é"], ["[1]"]),
    ({"type": "string", "minLength": 2}, 'a\n"', 'a\n"', ["a", "a</parameter>"]),
]


@pytest.mark.parametrize(("schema", "written", "value", "others"), VALUES)
def test_values_in_xml_follow_their_schema_and_are_read_by_it(
    schema: Any, written: str, value: Any, others: list[str]
) -> None:
    identifier = {"id": {"type": "string", "pattern": "^[0-9]{2}$"}}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": identifier}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    plan = ToolPlan.of(tokenizer_of(TEMPLATES["qwen3-coder"]), [tool], tool_choice="required")
    assert plan.grammar is not None
    assert not plan.grammar.unenforced
    call = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert accepts(plan.grammar.ebnf, call.format(written))
    assert not any(accepts(plan.grammar.ebnf, call.format(other)) for other in others)
    ((_, arguments),) = parsed(plan, list(call.format(written)))[1]
    assert json.loads(arguments) == {"a": value}
    jsonschema.validate({"a": value}, parameters)


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
FREE_TEXTS = ["", "Hello <b>world", "a < b, {x} and [y] <", "\n\n2 <tool_cal", "😀"]


@pytest.mark.parametrize("family", TEMPLATES)
def test_with_strict_and_auto_text_is_free_until_a_call_begins(family: str) -> None:
    plan = ToolPlan.of(tokenizer_of(TEMPLATES[family]), [STRICT, TIME])
    assert plan.grammar is not None
    ebnf, call = plan.grammar.ebnf, WRITTEN[family]
    assert all(accepts(ebnf, text) for text in FREE_TEXTS)
    before = "" if family == "llama" else "Let me see. "
    assert accepts(ebnf, before + call)
    assert not accepts(ebnf, before + call.replace("Paris", "Oslo"))
    assert not accepts(ebnf, before + call.replace("get_weather", "get_whether"))
    assert not accepts(ebnf, before + call[:-1])
    if family == "llama":
        assert accepts(ebnf, "Well <|python_tag|>" + call)
        assert not accepts(ebnf, "Well <|python_tag|>" + call.replace("Paris", "Oslo"))
        assert not accepts(ebnf, " {x}")
    if family == "mistral":
        assert accepts(ebnf, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "unit": "C"}')
        assert not accepts(ebnf, '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "unit": "C"}')


@pytest.mark.parametrize("family", TEMPLATES)
def test_an_answer_in_a_format_may_be_a_call_instead(family: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    plan = ToolPlan.of(tokenizer_of(TEMPLATES[family]), TOOLS, answer=json.dumps(schema))
    assert plan.grammar is not None
    params = plan.sampling(SamplingParams(json_schema=schema))
    assert params.constraint == ("grammar", plan.grammar.ebnf)
    assert accepts(plan.grammar.ebnf, '{"a": 1}')
    assert accepts(plan.grammar.ebnf, WRITTEN[family])
    assert not accepts(plan.grammar.ebnf, '{"a": "x"}')
    assert not accepts(plan.grammar.ebnf, "text")


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
    assert accepts(plan.grammar.ebnf, written)
    assert accepts(plan.grammar.ebnf, written.replace("</function>", "<parameter=any>\nx\n</parameter>\n</function>"))
    assert not accepts(plan.grammar.ebnf, written.replace("[1, 2]", "x"))
    assert not accepts(plan.grammar.ebnf, written.replace('<parameter=text>\na < b\n"c"\n</parameter>\n', ""))
    (call,) = parsed(plan, list(written))[1]
    assert json.loads(call[1]) == {"text": 'a < b\n"c"', "list": [1, 2]}


MARKS = {
    "hermes": ["<tool_call>", "</tool_call>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "llama": ["<|python_tag|>"],
    "qwen3-coder": ["<tool_call>"],
}


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("is_special", [False, True])
def test_strict_calls_of_a_free_text_are_valid_and_the_text_is_plains(family: str, is_special: bool) -> None:
    backend = byte_level(TEMPLATES[family])
    backend.add_tokens([AddedToken(mark, special=is_special, normalized=False) for mark in MARKS[family]])
    plan = ToolPlan.of(Tokenizer(backend, name="tiny"), [STRICT])
    likely = {backend.convert_tokens_to_ids(MARKS[family][0]): 6.0, **likely_ends(backend)}
    params = plan.sampling(SamplingParams(max_tokens=120, n=6, seed=1, logit_bias=likely))
    llm = LLM(TableLM(hashed(len(backend), 1)), ("ngram", "grammar"), tokenizer=backend)
    plain, *drafted = (llm.generate("Hi", params, draft=draft) for draft in ("none", "ngram", "grammar"))
    assert all([one.token_ids for one in done] == [one.token_ids for one in plain] for done in drafted)
    answers = [parsed(plan, [one.text]) for one in plain]
    whole = [arguments for _, calls in answers for _, arguments in calls if arguments.endswith("}")]
    assert whole
    for arguments in whole:
        jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])
    assert any(text for text, _ in answers)
