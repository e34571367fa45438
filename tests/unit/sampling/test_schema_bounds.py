"""Escapes and parts of expressions and schemas that are refused before compilation."""

from __future__ import annotations

from typing import Any

import pytest

from draftree.core.errors import InvalidRequestError
from draftree.sampling.params import SamplingParams
from schema_samples import ARRAY, INTEGER, OBJECT, STRING, Text, accepts, everything, guide


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
