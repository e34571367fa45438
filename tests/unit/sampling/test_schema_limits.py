"""Depth, size, repetitions, escapes and optional parts of schemas, expressions and grammars are limited."""

from __future__ import annotations

from typing import Any

import pytest

from draftree import SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.sampling.grammar.schema import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES
from schema_samples import ARRAY, INTEGER, OBJECT, STRING, Text, accepts, everything, guide


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


@pytest.mark.parametrize(
    "escape", [r"\ud83d", r"\uDC00", r"\xd800", r"\u{d83d}", r"\u{0dfff}", r"[a\ud800]", r"\ud83d\ude00"]
)
def test_an_escape_of_half_a_surrogate_pair_is_refused(escape: str) -> None:
    """Its text would be no Unicode, and is shown as replacement characters, which do not match."""
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        SamplingParams(regex=escape)
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        guide({**STRING, "pattern": escape})


@pytest.mark.parametrize("literal", [r'"\ud83d"', r'"\xdfff"', r'"\U0000d800"', r"[a\ud800]"])
def test_an_escape_of_half_a_surrogate_pair_is_refused_in_a_grammar(literal: str) -> None:
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        SamplingParams(grammar=f"root ::= {literal}")


@pytest.mark.parametrize("regex", [r"\x41B", r"a[\x0022]"])
def test_an_escape_that_takes_more_than_two_digits_is_refused(regex: str) -> None:
    r"""xgrammar reads all digits after \x as one number, so that \x0022 is a quotation mark."""
    with pytest.raises(InvalidRequestError, match=r"\\x followed by more than two"):
        everything().compile(SamplingParams(regex=regex))
    with pytest.raises(InvalidRequestError, match=r"\\x followed by more than two"):
        guide({**STRING, "pattern": regex})


def test_escapes_of_whole_characters_are_allowed() -> None:
    assert accepts({**STRING, "pattern": r"\x41G\u0042\u{1f600}\\ud800".replace("\\\\", "")}, Text('"AGB😀ud800"'))
    SamplingParams(regex=r"\\ud800\x41\u{1f600}[\u00e0-\u00ff]", grammar=None)


@pytest.mark.parametrize("part", [".?", "(ab)?", "(a|)", "(|a)", "(a||b)", "(?:.?)"])
def test_optional_parts_that_take_long_to_compile_are_bounded(part: str) -> None:
    """Compiling takes time in the square of their number: 300 of the form .? took minutes."""
    with pytest.raises(InvalidRequestError, match="300 optional parts"):
        SamplingParams(regex=part * 300)
    with pytest.raises(InvalidRequestError, match="300 optional parts"):
        guide({**STRING, "pattern": part * 300})
    SamplingParams(regex=part * 48)


def test_optional_parts_are_counted_in_each_rule_of_a_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="300 optional parts"):
        SamplingParams(grammar="root ::= " + "[a-z]? " * 300)
    SamplingParams(grammar="root ::= " + '"???" ' * 300 + r"[?\?]" + "".join(f'\nr{i} ::= "a"?' for i in range(300)))
    SamplingParams(regex=r"\?" * 300 + "[?]" * 300)


def properties(count: int, **more: Any) -> dict[str, Any]:
    return {**OBJECT, "properties": {f"p{place}": INTEGER for place in range(count)}, **more}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (properties(513, additionalProperties=True), "513 properties are combined with additional ones"),
        (properties(513, unevaluatedProperties=STRING), "513 properties are combined with additional ones"),
        (properties(100, minProperties=50), "make 5000, and at most 2048"),
        (properties(100, maxProperties=50), "make 5000, and at most 2048"),
        ({**ARRAY, "prefixItems": [properties(40, minProperties=30 + n) for n in range(3)]}, "make 3720"),
    ],
)
def test_properties_that_take_long_to_compile_are_bounded(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        guide(schema)


def test_properties_that_compile_soon_are_allowed() -> None:
    names = [f"p{place}" for place in range(600)]
    assert accepts(properties(600, required=names), dict.fromkeys(names, 1))
    assert accepts(properties(20, additionalProperties=INTEGER, minProperties=1), {"p3": 1, "x": 2})
    assert accepts(properties(40, minProperties=2, maxProperties=4), {"p3": 1, "p5": 2})
