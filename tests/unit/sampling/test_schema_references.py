"""References of JSON schemas: resolved as `jsonschema` resolves them, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from draftree.core.errors import InvalidRequestError
from draftree.sampling.grammar.schema import prepare_schema
from schema_samples import INTEGER, OBJECT, REFERENCES, Text, accepts, guide


@pytest.mark.parametrize(("schema", "good", "bad"), [row[1:] for row in REFERENCES], ids=[row[0] for row in REFERENCES])
def test_a_reference_is_followed(schema: Any, good: Any, bad: Any) -> None:
    assert accepts(schema, good)
    assert not accepts(schema, bad)
    if not isinstance(bad, Text):
        judge = Draft7Validator if "definitions" in schema else Draft202012Validator
        assert judge(schema).is_valid(good)
        assert not judge(schema).is_valid(bad)


def test_all_references_become_the_one_form_that_the_compiler_resolves() -> None:
    for _, schema, _, _ in REFERENCES:
        prepared = json.loads(prepare_schema(json.dumps(schema)))
        for part in parts(prepared):
            ref = part.get("$ref", "#")
            name = ref.removeprefix("#/$defs/") if isinstance(ref, str) else "#"
            assert name == "#" or (name.isalnum() and name in prepared["$defs"])


def parts(value: Any) -> list[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [*([value] if isinstance(value, dict) else []), *(part for one in inner for part in parts(one))]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "https://other.org/s"}, r"at #: '\$ref' 'https://other.org/s' is in another document"),
        ({**OBJECT, "properties": {"a": {"$ref": "other.json#/x"}}}, "at #/properties/a: .* another document"),
        ({**OBJECT, "properties": {"a/b": {"$ref": "#/no"}}}, "at #/properties/a~1b: .* no 'no'"),
        ({"$ref": "#a"}, "names an anchor that the schema does not have"),
        ({"$ref": "#/$defs/a~2", "$defs": {"a~2": {}}}, "'~' that is not followed by 0 or 1"),
        ({"$ref": "#/$defs/a/type", "$defs": {"a": INTEGER}}, "leads to str, which is not a schema"),
        ({"$ref": "#/anyOf/01", "anyOf": [INTEGER]}, "no '01'"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "refers to itself"),
        ({"$ref": 3}, "it must be text"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "x"}, "b": {"$id": "x"}}}, "name of another part"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, r"at #/\$defs/a: 'not' is not enforced"),
    ],
)
def test_a_reference_without_a_target_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        guide(schema)
