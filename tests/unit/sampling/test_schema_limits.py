"""Depth, size and repetitions of schemas, regular expressions and grammars are limited when they are given."""

from __future__ import annotations

from typing import Any

import pytest

from draftree import SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.sampling.grammar.schema import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES
from schema_samples import INTEGER, STRING, Text, accepts, guide


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


def test_references_that_multiply_a_schema_are_bounded() -> None:
    """Each level refers to all that are nested in it, and every one of them is copied."""
    inner: Any = {"enum": list(range(300))}
    for _ in range(25):
        inner = {"type": "object", "properties": {"a": inner, "b": {"const": 1}}}
    refs = [{"$ref": "#/$defs/deep" + "/properties/a" * level} for level in range(25)]
    with pytest.raises(InvalidRequestError, match="with its references resolved"):
        guide({"anyOf": refs, "$defs": {"deep": inner}})


@pytest.mark.parametrize("name", ["regex", "grammar"])
@pytest.mark.parametrize(("text", "reason"), [("a\ud83d", "surrogate"), ("a\0", "null"), ("a" * 40_000, "characters")])
def test_a_text_that_is_no_grammar_is_refused_when_it_is_given(name: str, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        SamplingParams(**{name: text})


@pytest.mark.parametrize("levels", [300, 1_500, 4_000])
def test_deep_expressions_are_refused(levels: int) -> None:
    inner = "(" * levels + "%s" + ")" * levels
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        SamplingParams(regex=inner % "a")
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        SamplingParams(grammar="root ::= " + inner % '"a"')


@pytest.mark.parametrize(
    "regex",
    [
        "a{5000}",
        "(((a{99}){99}){99}){99}",
        "(a|bc?){3,70000}",
        "a{99999999999999999999}",
        "(?:a{90}b){,90}",
    ],
)
def test_repetitions_that_multiply_are_refused(regex: str) -> None:
    with pytest.raises(InvalidRequestError, match="more than 4096 parts"):
        SamplingParams(regex=regex)
    with pytest.raises(InvalidRequestError, match=r"at #: 'pattern' .*more than 4096 parts"):
        guide({**STRING, "pattern": regex})


def test_repetitions_of_a_grammar_are_bounded_and_its_literals_are_not() -> None:
    with pytest.raises(InvalidRequestError, match="more than 4096 parts"):
        SamplingParams(grammar='root ::= (item{80} "x"){80}\nitem ::= "a"')
    SamplingParams(grammar='root ::= item{80} "((((((?*+{9}{9999}" [(a{9999}] # {9999}{9999}\nitem ::= "a"*')
    SamplingParams(regex=r"[a{9999}]{1,30}\{9999\}, ([a-z]+ ){5,30}(?:yes|no)?" + "|value" * 1000)
