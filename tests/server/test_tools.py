"""Calls of tools: parsing of every family's format, in any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree import SamplingParams
from draftree.serve.tools.deltas import CallDelta, TextDelta, merged
from draftree.serve.tools.json_scan import JsonScan, State
from draftree.serve.tools.plan import ToolPlan
from draftree.text.tokenizer import Tokenizer
from text_backends import byte_level
from tool_samples import PARIS, TOOLS, parsed, plan_of
from tool_templates import TEMPLATES

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
def test_a_call_of_every_family_is_parsed(family: str) -> None:
    plan = plan_of(family)
    assert plan.family is not None
    assert plan.family.name == family
    text, calls = parsed(plan, [WRITTEN[family]])
    assert text == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", PARIS)]


@pytest.mark.parametrize("family", TEMPLATES)
def test_several_calls_are_parsed_or_limited_to_one(family: str) -> None:
    written = WRITTEN[family] + SECOND[family]
    _, calls = parsed(plan_of(family), [written])
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
    assert parser.push('Well.\n<tool_call>\n{"name": "get_weather", "argu') == [TextDelta("Well.")]
    first, second = parser.push('ments": {"ci')
    assert isinstance(first, CallDelta)
    assert (first.index, first.name, first.arguments) == (0, "get_weather", "")
    assert second == CallDelta(0, '{"ci')
    assert parser.push('ty": "Paris"') == [CallDelta(0, 'ty": "Paris"')]
    assert parser.push("}}\n</tool_call>\n") == [CallDelta(0, "}")]
    assert parser.finish() == []


def test_ids_of_calls_have_the_length_that_the_template_accepts() -> None:
    for family, length in (("mistral", 9), ("hermes", 29)):
        first = plan_of(family).parser().push(WRITTEN[family])[0]
        assert isinstance(first, CallDelta)
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
    deltas = [TextDelta("a"), TextDelta("b"), CallDelta(0, id="x", name="f"), CallDelta(0, "{"), CallDelta(0, "}")]
    assert merged(deltas) == [TextDelta("ab"), CallDelta(0, id="x", name="f"), CallDelta(0, "{}")]
