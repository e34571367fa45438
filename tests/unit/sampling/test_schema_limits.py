"""Schemas and grammars are bounded, and their texts are valid Unicode."""

from __future__ import annotations

from typing import Any

import pytest

from draftree import SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.sampling.grammar.schema import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES
from draftree.sampling.history import History
from schema_samples import END, INTEGER, OBJECT, STRING, Text, accepts, everything


def nested(levels: int) -> Any:
    schema: Any = INTEGER
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def deep_text(levels: int) -> str:
    return '{"type": "array", "items": ' * levels + "{}" + "}" * levels


def loop() -> Any:
    schema: Any = {"type": "array"}
    schema["items"] = schema
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (nested(MAX_DEPTH), "deeper than 64 levels"),
        (nested(900), "deeper than 64 levels"),
        (nested(100_000), "deeper than 64 levels"),
        (deep_text(5_000), "deeper than 64 levels"),
        ('{"enum": [' + "[" * 100_000, "deeper than 64 levels"),
        (deep_text(100_000), "characters"),
        (loop(), "deeper than 64 levels"),
        ({"enum": list(range(100_000))}, f"more than {MAX_VALUES} values"),
        ({"enum": ["x" * MAX_CHARACTERS]}, "characters"),
        ('{"const": "' + "x" * MAX_CHARACTERS + '"}', "characters"),
        ({"const": "\ud83d"}, "surrogate"),
        ('{"const": "\\ud83d"}', "surrogate"),
        ({"\udc00": 1}, "surrogate"),
        ('{"type": "string", "type": "integer"}', "'type' occurs twice"),
        ('{"const": ' + "1" * 5000 + "}", "json_schema"),
    ],
)
def test_a_schema_out_of_bounds_is_refused_when_it_is_given(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as found:
        SamplingParams(json_schema=schema)
    assert len(str(found.value)) < 400


def test_a_schema_within_the_bounds_is_compiled() -> None:
    assert accepts(nested(MAX_DEPTH - 1), Text("[" * 63 + "1" + "]" * 63))
    assert accepts({"enum": list(range(MAX_VALUES - 2))}, 8000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a\ud83d", "surrogate"),
        ("a\0", "null"),
        ("a" * 300_000, "characters"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "nested deeper"),
        ("root ::= \u201ca\u201d", "'\u201c' at line 1, column 10 is outside a literal"),
        ('root ::= "a" # \u00e9\nr\u00e9 ::= "b"', "'\u00e9' at line 2, column 2"),
        ('root ::= "a"\u3000"b"', "line 1, column 13"),
        ('\ufeffroot ::= "a"', "line 1, column 1"),
        (r'root ::= "\ud83d"', "half of a surrogate pair"),
        (r'root ::= "\U0000d800"', "half of a surrogate pair"),
        (r"root ::= [a\ud800]", "half of a surrogate pair"),
    ],
)
def test_a_text_that_is_no_grammar_is_refused_when_it_is_given(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        SamplingParams(grammar=text)


@pytest.mark.parametrize("body", ["[^a]", r"[^\n\]\-]", r"[\x80-\uffff]", r"[b-\U0010ffff]*"])
def test_classes_of_a_grammar_hold_whole_characters_only(body: str) -> None:
    params = SamplingParams(grammar=f'root ::= {body} # [^"]')
    (found,) = everything().open(params, [END]).allowed(History([0]), [(*"é".encode(), END)])
    assert found is not None
    for wrong in (b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"):
        assert everything().open(params, [END]).allowed(History([0]), [(*wrong, END)]) == [None]


@pytest.mark.parametrize("value", ['"', "\\", "\n", "\t", "\x01", "é", "😀", 'a"\n', "\\😀\x1f"])
def test_each_character_of_a_bounded_string_counts_once_also_if_it_is_escaped(value: str) -> None:
    count = len(value)
    assert accepts({**STRING, "minLength": count, "maxLength": count}, value)
    assert not accepts({**STRING, "minLength": count + 1, "maxLength": count + 9}, value)
    assert not accepts({**STRING, "maxLength": count - 1}, value)
    assert accepts({**STRING, "pattern": "^[^a]|^a"}, value)


@pytest.mark.parametrize("text", [r'"\ud83d"', r'"\udc00\ud83d"', r'"\ud83dx"', r'"\x"', '"\x01"', '"\n"'])
def test_a_string_that_is_not_unicode_or_not_json_is_not_accepted(text: str) -> None:
    assert not accepts(STRING, Text(text))
    assert not accepts({}, Text(text))
    assert accepts(STRING, Text(r'"\ud83d\ude00\u00e9\/"'))


def test_repetitions_of_a_grammar_are_bounded_and_its_literals_are_not() -> None:
    with pytest.raises(InvalidRequestError, match="more than 4096 parts"):
        SamplingParams(grammar='root ::= (item{80} "x"){80}\nitem ::= "a"')
    SamplingParams(grammar='root ::= item{80} "((((((?*+{9}{9999}" [(a{9999}] # {9999}{9999}\nitem ::= "a"*')


def test_optional_parts_are_counted_in_each_rule_of_a_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="300 optional parts"):
        SamplingParams(grammar="root ::= " + "[a-z]? " * 300)
    SamplingParams(grammar="root ::= " + '"???" ' * 300 + r"[?\?]" + "".join(f'\nr{i} ::= "a"?' for i in range(300)))


def properties(count: int, **more: Any) -> dict[str, Any]:
    return {**OBJECT, "properties": {f"p{place}": INTEGER for place in range(count)}, **more}


def test_many_properties_are_allowed() -> None:
    names = [f"p{place}" for place in range(600)]
    assert accepts(properties(600, required=names), dict.fromkeys(names, 1))
    assert accepts(properties(20, additionalProperties=INTEGER, minProperties=1), {"p3": 1, "x": 2})
    assert accepts(properties(40, minProperties=2, maxProperties=4), {"p3": 1, "p5": 2})
