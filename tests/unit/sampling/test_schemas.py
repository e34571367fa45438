"""JSON schemas under a grammar: keywords are enforced or reported, references resolved, as `jsonschema` judges."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from draftree.core.errors import InvalidRequestError
from draftree.sampling.grammar.languages import FORMATS
from draftree.sampling.grammar.schema import violations
from draftree.sampling.grammar.schema_grammar import schema_grammar
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
    "const": ({"const": {"a": [1, 2.5]}}, {"a": [1, 2.5]}, {"a": [1]}),
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
REPORTED = {
    "$dynamicRef",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "oneOf",
    "uniqueItems",
}


def unenforced(schema: Any) -> tuple[str, ...]:
    return schema_grammar(json.dumps(schema)).unenforced


def test_every_keyword_that_jsonschema_checks_is_in_the_table() -> None:
    assert set(Draft202012Validator.VALIDATORS) <= set(KEYWORDS)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_is_enforced_or_reported_by_name(keyword: str) -> None:
    schema, good, bad = KEYWORDS[keyword]
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    assert validator.is_valid(good)
    assert not validator.is_valid(bad)
    assert accepts(schema, good)
    if keyword in REPORTED:
        assert [report.partition(":")[0] for report in unenforced(schema)] == [f"'{keyword}' at #"]
        assert violations(json.dumps(schema), json.dumps(good)) == ()
        assert violations(json.dumps(schema), json.dumps(bad))
    else:
        assert unenforced(schema) == ()
        assert not accepts(schema, bad)


NOTED: list[tuple[Any, str]] = [
    ({"typ": "integer"}, "'typ' at #: no keyword of JSON Schema .did you mean 'type'"),
    ({"$recursiveRef": "#"}, r"'\$recursiveRef' at #"),
    ({**ARRAY, "items": {**ARRAY, "contains": False}}, "'contains' at #/items"),
    ({**OBJECT, "properties": {"a/b": {"not": {"minLength": 3}}}}, "'not' at #/properties/a~1b"),
    ({**INTEGER, "multipleOf": 2000}, "'multipleOf' at #"),
    ({**STRING, "maxLength": 3000}, "'maxLength' 3000 at #"),
    ({**STRING, "pattern": "^a", "maxLength": 3000}, "'maxLength' 3000 at #"),
    ({**STRING, "format": "uuid", "maxLength": 3}, "'format' 'uuid' at #: no text fits it"),
    ({**STRING, "pattern": "(?i)a"}, "'pattern' .*flags"),
    ({**STRING, "pattern": "a++"}, "'pattern' .*two quantifiers"),
    ({**STRING, "pattern": r"\Aa\Z"}, r"'pattern' .*\\A is not supported"),
    ({**OBJECT, "propertyNames": {"pattern": r"\ba"}}, "'pattern' .*at #/propertyNames"),
    ({**OBJECT, "minProperties": 2}, "'minProperties' at #: free names may occur twice"),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]}, "the schemas at 0 and 1"),
    ({"oneOf": [STRING, INTEGER, {"enum": ["a"]}]}, "the schemas at 0 and 2"),
    (
        {"oneOf": [{**OBJECT, "properties": {"k": {"const": "a"}}}, {**OBJECT, "properties": {"k": {"const": "b"}}}]},
        "the schemas at 0 and 1",
    ),
]


@pytest.mark.parametrize(("schema", "reason"), NOTED)
def test_what_cannot_be_enforced_is_reported_with_its_place(schema: Any, reason: str) -> None:
    (report,) = unenforced(schema)
    assert re.search(reason, report)
    assert written(schema, 1) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {**INTEGER, "nullable": True, "format": "int32", "order": 3, "optional": True, "markdownDescription": "*a*"},
        {**STRING, "format": "nonsense", "contentEncoding": "base64"},
        {"type": "string", "x-note": {"not": {}}, "deprecated": True, "examples": [1]},
    ],
)
def test_unknown_words_and_formats_are_annotations(schema: Any) -> None:
    assert unenforced(schema) == ()
    assert accepts(schema, 3 if schema["type"] == "integer" else "a")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "at #: 'type' is 'strin'"),
        ({**OBJECT, "properties": {"a": {"enum": []}}}, "at #/properties/a: 'enum' is empty"),
        ({**STRING, "maxLength": -1}, "'maxLength' is -1"),
        ({**STRING, "pattern": 3}, "'pattern' is 3: it must be a text"),
        ({**OBJECT, "properties": {"a": 3}}, "3 is not a schema"),
        ({"allOf": 3}, "'allOf' is 3: it must be a list"),
        ({**INTEGER, "multipleOf": 0}, "'multipleOf' must be above 0"),
        ({"type": []}, "no text follows the schema"),
        ({**INTEGER, "const": "a"}, "no text follows the schema"),
        ({**INTEGER, "minimum": 3, "maximum": 2}, "no text follows the schema"),
        ({**STRING, "pattern": "x^a"}, "no text follows the schema"),
        ({**OBJECT, "required": ["a"], "additionalProperties": False}, "no text follows the schema"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no text follows the schema"),
    ],
)
def test_schemas_without_a_text_or_of_a_wrong_form_are_refused(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as found:
        guide(schema)
    assert "/cpp/" not in str(found.value)


TAGGED = [
    {**OBJECT, "properties": {"kind": {"const": tag}, "size": INTEGER}, "required": ["kind"]} for tag in ("cat", "dog")
]
SOUND: list[Any] = [
    *(row[1] for row in REFERENCES if row[0] not in ("true", "unused gap", "anchor of draft 7")),
    *(row[0] for keyword, row in KEYWORDS.items() if keyword not in REPORTED),
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
    *({**STRING, "format": name} for name in FORMATS),
    {"allOf": [{**STRING, "pattern": "^a"}, {"pattern": "b$", "maxLength": 9}, {"minLength": 4}]},
    {**STRING, "pattern": r"^[!-~]+\n?\"[\\x]$", "minLength": 3},
    {**STRING, "pattern": r"^(?!.*xx)[x-z]+$", "maxLength": 9},
    {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": ["integer", "string"], "maximum": 40}}},
    {"type": "number", "multipleOf": 0.25, "minimum": -3, "exclusiveMaximum": 7.5},
    {**INTEGER, "minimum": -(10**30), "maximum": 2**70},
    {"enum": ["a", "aa", 7, 2**80], "maxLength": 1},
    {**OBJECT, "properties": {"a": INTEGER}, "required": ["b"], "additionalProperties": STRING},
    {**OBJECT, "patternProperties": {"[ab]": INTEGER, "[bc]": {"minimum": 3}}, "additionalProperties": STRING},
    {**OBJECT, "properties": {"ab": STRING, "c": {}}, "patternProperties": {"^a": {"maxLength": 2}}},
    {**OBJECT, "propertyNames": {"pattern": "^[a-c]+$"}, "properties": {"d": INTEGER}, "additionalProperties": True},
    {
        "allOf": [{**OBJECT, "properties": {"a": INTEGER}}, {"properties": {"a": {"minimum": 3}, "b": STRING}}],
        "required": ["a"],
        "unevaluatedProperties": False,
    },
    {**OBJECT, "properties": {"a": INTEGER, "b": INTEGER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {**ARRAY, "prefixItems": [INTEGER], "items": STRING, "maxItems": 3},
    {"not": {"type": ["string", "number"]}, "maxItems": 2},
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
    ],
)
def test_a_reference_without_a_target_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        guide(schema)
