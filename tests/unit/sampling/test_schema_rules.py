"""JSON schemas as rules of a larger grammar enforce what the schemas alone enforce."""

from __future__ import annotations

from typing import Any

import pytest

from draftree.sampling.grammar.schema import schema_text
from draftree.sampling.grammar.schema_refs import SchemaError
from draftree.sampling.grammar.schema_rules import SchemaRules, literal
from grammar_samples import accepts

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["é", "😀", '"x\\']},
            "code": {"type": "string", "minLength": 2, "maxLength": 3},
            "sub": {"$ref": "#/$defs/sub"},
            "when": {"type": "string", "format": "date"},
        },
        "required": ["city"],
        "$defs": {"sub": {"type": "object", "properties": {"q": {"type": "integer"}}}},
    },
    {"type": "object"},
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {"root": {"type": "object", "additionalProperties": {"type": "integer"}}}},
]


def grammar() -> str:
    rules = SchemaRules()
    names = [rules.add(schema_text(schema), f"s{number}") for number, schema in enumerate(SCHEMAS)]
    root = " | ".join(f"{literal(f'<{number}>')} {name}" for number, name in enumerate(names))
    return f"root ::= {root}\n{rules.text}"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('<0>{"city": "Paris"}', True),
        ('<0>{"city": "P", "unit": "😀", "code": "abc", "sub": {"q": 1}, "when": "2024-02-29"}', True),
        ('<0>{"city": "P", "unit": "\\"x\\\\"}', True),
        ('<0>{"city": "P", "code": "a\x01c"}', False),
        ('<0>{"city": "P", "code": "abcd"}', False),
        ('<0>{"city": 3}', False),
        ("<0>{}", False),
        ('<0>{"city": "P", "sub": {"q": "x"}}', False),
        ('<1>{"a": [1, null]}', True),
        ("<1>[]", False),
        ("<2>{}", True),
        ('<2>{"a": 1}', False),
        ('<3>{"root": {"x": 3}}', True),
        ('<3>{"root": {"x": "y"}}', False),
        ('{"city": "P"}', False),
    ],
)
def test_each_schema_is_enforced_after_its_own_text(text: str, wanted: bool) -> None:
    assert accepts(grammar(), text) is wanted


def test_what_a_grammar_would_not_enforce_is_refused() -> None:
    with pytest.raises(SchemaError):
        SchemaRules().add(schema_text({"type": "object", "not": {"type": "null"}}), "s")


def test_literals_are_escaped() -> None:
    assert literal('a"\\\n') == '"a\\"\\\\\\n"'
