"""JSON schemas under a grammar: keywords are enforced or refused, references resolved, as `jsonschema` judges."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from draftree.core.errors import InvalidRequestError
from draftree.sampling.grammar.schema import prepare_schema
from schema_samples import ARRAY, INTEGER, OBJECT, REFERENCES, STRING, Text, accepts, guide, written

# keyword: a schema, a value that fits, a value that breaks it
KEYWORDS: dict[str, tuple[Any, Any, Any]] = {
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, 1, "a"),
    "$dynamicRef": ({"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a", **INTEGER}}}, 1, "a"),
    "additionalProperties": (
        {**OBJECT, "properties": {"a": INTEGER}, "additionalProperties": STRING},
        {"b": "x"},
        {"b": 1},
    ),
    "allOf": ({"allOf": [INTEGER, {"minimum": 3}]}, 3, 1),
    "anyOf": ({"anyOf": [INTEGER, STRING]}, 1, 1.5),
    "const": ({"const": {"a": [1, 2.5]}}, Text('{"a":[1,2.5]}'), {"a": [1]}),
    "contains": ({**ARRAY, "contains": INTEGER}, [1], []),
    "dependentRequired": (
        {**OBJECT, "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
        {"a": 1, "b": 1},
        {"a": 1},
    ),
    "dependentSchemas": (
        {**OBJECT, "properties": {"a": INTEGER, "b": INTEGER}, "dependentSchemas": {"a": {"required": ["b"]}}},
        {"a": 1, "b": 1},
        {"a": 1},
    ),
    "enum": ({"enum": [1, "a"]}, "a", 2),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 3}, 2.5, 3),
    "exclusiveMinimum": ({"type": "number", "exclusiveMinimum": 3}, 3.5, 3),
    "format": ({**STRING, "format": "ipv4"}, "1.2.3.4", "1.2.3.444"),
    "if": ({"if": STRING, "then": {"maxLength": 1}}, "a", "aa"),
    "items": ({**ARRAY, "items": INTEGER}, [1], ["a"]),
    "maxItems": ({**ARRAY, "maxItems": 1}, [1], [1, 1]),
    "maxLength": ({**STRING, "maxLength": 1}, "é", "aa"),
    "maxProperties": (
        {**OBJECT, "properties": {"a": INTEGER, "b": INTEGER}, "maxProperties": 1},
        {"a": 1},
        {"a": 1, "b": 1},
    ),
    "maximum": ({"type": "number", "maximum": 3}, 3, 3.5),
    "minItems": ({**ARRAY, "minItems": 1}, [1], []),
    "minLength": ({**STRING, "minLength": 2}, "aa", "a"),
    "minProperties": ({**OBJECT, "properties": {"a": INTEGER}, "minProperties": 1}, {"a": 1}, {}),
    "minimum": ({**INTEGER, "minimum": 3}, 3, 2),
    "multipleOf": ({**INTEGER, "multipleOf": 7}, 14, 15),
    "not": ({"not": STRING}, 1, "a"),
    "oneOf": ({"oneOf": [INTEGER, {"type": "number"}]}, 1.5, 1),
    "pattern": ({**STRING, "pattern": "^a+$"}, "aa", "b"),
    "patternProperties": ({**OBJECT, "patternProperties": {"^ab$": INTEGER}}, {"ab": 1}, {"ab": "x"}),
    "prefixItems": ({**ARRAY, "prefixItems": [INTEGER, STRING]}, [1, "a"], ["a"]),
    "properties": ({**OBJECT, "properties": {"a": INTEGER}}, {"a": 1}, {"a": "x"}),
    "propertyNames": ({**OBJECT, "propertyNames": {"maxLength": 1}}, {"a": 1}, {"ab": 1}),
    "required": ({**OBJECT, "properties": {"a": INTEGER}, "required": ["a"]}, {"a": 1}, {}),
    "type": ({"type": ["integer", "null"]}, None, "a"),
    "unevaluatedItems": ({**ARRAY, "prefixItems": [INTEGER], "unevaluatedItems": False}, [1], [1, 1]),
    "unevaluatedProperties": (
        {**OBJECT, "properties": {"a": INTEGER}, "unevaluatedProperties": False},
        {"a": 1},
        {"b": 1},
    ),
    "uniqueItems": ({**ARRAY, "uniqueItems": True}, [1, 2], [1, 1]),
}
REFUSED = {
    "$dynamicRef",
    "allOf",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "not",
    "oneOf",
    "uniqueItems",
}


def test_every_keyword_that_jsonschema_checks_is_in_the_table() -> None:
    assert set(Draft202012Validator.VALIDATORS) <= set(KEYWORDS)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_is_enforced_or_refused_by_name(keyword: str) -> None:
    schema, good, bad = KEYWORDS[keyword]
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    assert validator.is_valid(json.loads(good) if isinstance(good, Text) else good)
    assert not validator.is_valid(bad)
    if keyword in REFUSED:
        with pytest.raises(
            InvalidRequestError,
            match=rf"at #: '\{keyword}'.* is not enforced"
            if keyword[0] == "$"
            else f"at #: '{keyword}'.* is not enforced",
        ):
            guide(schema)
    else:
        assert accepts(schema, good)
        assert not accepts(schema, bad)


UNSOUND: list[tuple[Any, str]] = [
    ({"typ": "integer"}, "'typ' is not enforced .did you mean 'type'"),
    ({**STRING, "contentEncoding": "base64"}, "contentEncoding"),
    ({**INTEGER, "nullable": True}, "nullable"),
    ({**ARRAY, "items": INTEGER, "additionalItems": False}, "additionalItems"),
    ({"$recursiveRef": "#"}, "recursiveRef"),
    ({**ARRAY, "contains": False}, "contains"),
    ({"minItems": 1}, "'minItems' without a 'type'"),
    ({"maxProperties": 1}, "'maxProperties' without a 'type'"),
    ({"required": ["a"]}, "'required' without a 'type'"),
    ({"format": "uuid"}, "'format' without a 'type'"),
    ({"patternProperties": {"a": INTEGER}}, "'patternProperties' without a 'type'"),
    ({"propertyNames": {"maxLength": 1}}, "'propertyNames' without a 'type'"),
    ({"properties": {}, "minItems": 1}, "'minItems' without a 'type'"),
    ({**ARRAY, "items": {"maxLength": 1}}, "at #/items: 'maxLength' without a 'type'"),
    ({"type": []}, "empty 'type'"),
    ({"type": "integer", "enum": [1, "a"]}, "'type' beside 'enum'"),
    ({"type": "integer", "const": "a"}, "'type' beside 'const'"),
    ({"const": 1, "enum": [1, 2]}, "'enum' beside 'const'"),
    ({"enum": ["a", "aa"], "maxLength": 1}, "'maxLength' beside 'enum'"),
    ({"type": "string", "enum": ["a", "aa"], "maxLength": 1}, "'maxLength' beside 'enum'"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INTEGER}}, "'minimum' beside"),
    ({"anyOf": [INTEGER, STRING], "oneOf": [STRING]}, "'oneOf' beside 'anyOf'"),
    ({"allOf": []}, "allOf"),
    ({"const": 2**63}, "beyond"),
    ({"enum": [[{"a": -(2**70)}]]}, "beyond"),
    ({**INTEGER, "minimum": -(10**30)}, "beyond"),
    ({**INTEGER, "multipleOf": 2000}, "multipleOf"),
    ({**INTEGER, "multipleOf": 0.5}, "multipleOf"),
    ({**INTEGER, "multipleOf": 3, "minimum": 2}, "'multipleOf' beside 'minimum'"),
    ({"type": ["integer", "number"], "multipleOf": 2}, "multipleOf"),
    ({**STRING, "format": "nonsense"}, "'format' 'nonsense'"),
    ({**STRING, "format": "json-pointer"}, "'format' 'json-pointer'"),
    ({**INTEGER, "format": "int32"}, "'format' 'int32'"),
    ({**STRING, "format": "uuid", "maxLength": 3}, "'maxLength' beside 'format'"),
    ({**STRING, "format": "uuid", "pattern": "a"}, "'pattern' beside 'format'"),
    ({**STRING, "pattern": "x^a"}, "only at its ends"),
    ({**STRING, "pattern": "(?!a)b"}, "look-around"),
    ({**STRING, "pattern": "(?i)a"}, "flags"),
    ({**STRING, "pattern": "a++"}, "two quantifiers"),
    ({**STRING, "pattern": r"\Aa\Z"}, r"escape \\A"),
    ({**STRING, "pattern": r"\x22"}, "quotation mark"),
    ({**STRING, "pattern": r"[\u005c]"}, "quotation mark"),
    ({**STRING, "pattern": r"\u{22}"}, "quotation mark"),
    ({**STRING, "pattern": r"a\n"}, "control character"),
    ({**OBJECT, "propertyNames": {"pattern": r"\x22"}}, "at #/propertyNames: .*quotation mark"),
    ({**OBJECT, "patternProperties": {"[ab]": INTEGER, "[bc]": STRING}}, "several patterns"),
    ({**OBJECT, "properties": {"ab": STRING}, "patternProperties": {"^a": INTEGER}}, "beside 'properties'"),
    ({**OBJECT, "patternProperties": {"a": INTEGER}, "propertyNames": {"const": "a"}}, "beside 'propertyNames'"),
    ({**OBJECT, "patternProperties": {"a": INTEGER}, "additionalProperties": STRING}, "beside 'additionalProperties'"),
    ({**OBJECT, "patternProperties": {"a^b": INTEGER}}, "only at its ends"),
    ({**OBJECT, "properties": {"abc": INTEGER}, "propertyNames": {"maxLength": 1}}, "beside 'properties'"),
    ({**OBJECT, "propertyNames": {"maxLength": 1}, "additionalProperties": False}, "beside 'additionalProperties'"),
    ({**OBJECT, "minProperties": 2}, "'minProperties' above 1"),
    ({**OBJECT, "required": ["b"], "additionalProperties": True}, "'b', which is not among"),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]}, "those at 0 and 1"),
    ({"oneOf": [STRING, INTEGER, {"enum": ["a"]}]}, "those at 0 and 2"),
    (
        {"oneOf": [{**OBJECT, "properties": {"k": {"const": "a"}}}, {**OBJECT, "properties": {"k": {"const": "b"}}}]},
        "oneOf",
    ),
]


@pytest.mark.parametrize(("schema", "reason"), UNSOUND)
def test_unenforced_keywords_are_refused_by_name(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as found:
        guide(schema)
    assert "at #" in str(found.value)


TAGGED = [
    {**OBJECT, "properties": {"kind": {"const": tag}, "size": INTEGER}, "required": ["kind"]} for tag in ("cat", "dog")
]
SOUND: list[Any] = [
    *(row[1] for row in REFERENCES if row[0] not in ("true", "unused gap", "anchor of draft 7")),
    *(row[0] for keyword, row in KEYWORDS.items() if keyword not in REFUSED),
    {"oneOf": [INTEGER, STRING, {"type": "null"}]},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": TAGGED[0], "b": TAGGED[1]}},
    {"oneOf": TAGGED, "discriminator": {"propertyName": "kind"}},
    {"oneOf": [{"enum": [1, True]}, {"enum": ["1", False]}]},
    {"oneOf": [{"anyOf": [INTEGER, {"type": "null"}]}, {"type": ["string", "array"], "maxLength": 2, "maxItems": 0}]},
    {"type": "string", "enum": ["a", 'é\n"\\/\u2028\x7f\x01😀'], "title": "x"},
    {"enum": [1.0, 0.1, 1e300, 1.5, -3, 2**60, None, True, [], {"a": {"b": [1]}}]},
    {"type": ["integer", "string"], "minimum": 3, "maxLength": 1},
    {**OBJECT, "properties": {"a b": INTEGER, 'q"\\': STRING}, "required": ["a b"], "additionalProperties": False},
    {**OBJECT, "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "string", "pattern": "[a-c]+"}}},
    {**OBJECT, "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER, "minProperties": 1},
    {**ARRAY, "prefixItems": [INTEGER, STRING], "items": False, "minItems": 2},
    {**ARRAY, "items": {"anyOf": [INTEGER, {"$ref": "#"}]}, "uniqueItems": False, "x-note": 1},
    {"type": "number", "minimum": 0.12345678, "exclusiveMaximum": 1.0000001},
    {"type": "number", "exclusiveMinimum": -2, "maximum": -0.5},
    {**INTEGER, "minimum": -5, "exclusiveMinimum": -3, "maximum": 120},
    {**STRING, "pattern": r"^[!-~]{1,3}\s\S[^\d\n]\.(?:a|b)?(c)$"},
    {**STRING, "pattern": "^a|b$"},
    {**STRING, "minLength": 1, "maxLength": 4},
    *({**STRING, "format": name} for name in ("date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time")),
    *({**STRING, "format": name} for name in ("relative-json-pointer", "uri", "uri-reference", "uri-template", "uuid")),
]


@pytest.mark.parametrize("schema", SOUND, ids=lambda schema: json.dumps(schema)[:60])
def test_random_texts_of_a_grammar_are_valid(schema: Any) -> None:
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    texts = [text for seed in range(12) if (text := written(schema, seed)) is not None]
    assert texts
    for text in texts:
        validator.validate(json.loads(text))


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
