"""JSON schemas under a grammar: what is enforced, and that all else is refused. `jsonschema` is the judge."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from draftree import SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.sampling.grammar import Grammars
from draftree.sampling.guide import Guide
from draftree.sampling.history import History
from draftree.sampling.schema import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES, prepare_schema

END = 256
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
OBJECT, ARRAY = {"type": "object"}, {"type": "array"}


@functools.cache
def everything() -> Grammars:
    """A vocabulary of all bytes."""
    return Grammars([bytes([byte]) for byte in range(256)] + [None], vocab_size=257)


def guide(schema: Any) -> Guide:
    return everything().open(SamplingParams(json_schema=schema), [END])


def choices(led: Guide, written: History) -> list[int]:
    (allowed,) = led.allowed(written, [()])
    assert allowed is not None
    tokens = set(allowed.tokens.tolist())
    return sorted(set(range(257)) - tokens if allowed.forbids else tokens)


def accepts(schema: Any, value: Any) -> bool:
    text = value if isinstance(value, Text) else json.dumps(value, ensure_ascii=False)
    (found,) = guide(schema).allowed(History([0]), [(*text.encode(), END)])
    return found is not None


class Text(str):
    """JSON text as it stands."""


def written(schema: Any, seed: int, most: int = 600) -> str | None:
    """A random text of a schema's grammar; None if it is not over after so many bytes."""
    led, history, chance = guide(schema), History([0]), random.Random(seed)
    for _ in range(most):
        allowed = choices(led, history)
        ends = [byte for byte in allowed if byte in (END, *b'"}]')]
        plain = [byte for byte in allowed if byte == END or 0x20 <= byte < 0x7F]
        token = chance.choice(ends if ends and chance.random() < 0.4 else plain or allowed)
        if token == END:
            return bytes(history.output.tolist()).decode()
        history.append([token])
    return None


NODE = {"type": "object", "properties": {"v": INTEGER, "next": {"$ref": "#/$defs/node"}}, "required": ["v"]}
REFERENCES: list[tuple[str, Any, Any, Any]] = [
    ("pointer", {"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}, 1, "a"),
    ("definitions", {"$ref": "#/definitions/a", "definitions": {"a": INTEGER}}, 1, "a"),
    ("anchor", {"$ref": "#a", "$defs": {"x": {"$anchor": "a", **INTEGER}}}, 1, "a"),
    ("dynamic anchor", {"$ref": "#a", "$defs": {"x": {"$dynamicAnchor": "a", **INTEGER}}}, 1, "a"),
    ("anchor of draft 7", {"$ref": "#a", "definitions": {"x": {"$id": "#a", **INTEGER}}}, 1, "a"),
    ("own id", {"$id": "https://x.org/s", "$ref": "https://x.org/s#/$defs/a", "$defs": {"a": INTEGER}}, 1, "a"),
    ("id and anchor", {"$id": "https://x.org/s", "$ref": "s#a", "$defs": {"a": {"$anchor": "a", **INTEGER}}}, 1, "a"),
    ("urn", {"$id": "urn:x:y", "$ref": "urn:x:y#/$defs/a", "$defs": {"a": INTEGER}}, 1, "a"),
    ("part by id", {"$id": "https://x.org/s/", "$ref": "a", "$defs": {"z": {"$id": "a", **INTEGER}}}, 1, "a"),
    (
        "nested scope",
        {
            "$id": "https://x.org/s",
            "$ref": "#/$defs/inner",
            "$defs": {
                "a": STRING,
                "inner": {"$id": "/inner", "type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": INTEGER}},
            },
        },
        [1],
        ["a"],
    ),
    (
        "pointer into a nested scope",
        {
            "$id": "https://x.org/s",
            "$ref": "#/$defs/inner/properties/p",
            "$defs": {
                "a": STRING,
                "inner": {"$id": "i", "properties": {"p": {"$ref": "#/$defs/a"}}, "$defs": {"a": INTEGER}},
            },
        },
        1,
        "a",
    ),
    ("slash", {"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER}}, 1, "a"),
    ("tilde", {"$ref": "#/$defs/a~0b", "$defs": {"a~b": INTEGER}}, 1, "a"),
    ("tilde and one", {"$ref": "#/$defs/a~01b", "$defs": {"a~1b": INTEGER, "a/b": STRING}}, 1, "a"),
    ("per cent", {"$ref": "#/$defs/a%25b%20%C3%A9", "$defs": {"a%b é": INTEGER}}, 1, "a"),
    ("index", {"anyOf": [INTEGER, {"type": "array", "items": {"$ref": "#/anyOf/0"}}]}, [1], ["a"]),
    ("property", {**OBJECT, "properties": {"a": INTEGER, "b": {"$ref": "#/properties/a"}}}, {"b": 1}, {"b": "x"}),
    ("name of a word", {**OBJECT, "properties": {"$ref": INTEGER}}, {"$ref": 1}, {"$ref": "x"}),
    ("root", {"type": "array", "items": {"$ref": "#"}}, [[]], [1]),
    ("empty", {"type": "array", "items": {"$ref": ""}}, [[]], [1]),
    ("root by id", {"$id": "https://x.org/s", "type": "array", "items": {"$ref": "https://x.org/s"}}, [[]], [1]),
    ("recursion", {"$ref": "#/$defs/node", "$defs": {"node": NODE}}, {"v": 1, "next": {"v": 2}}, {"v": 1, "next": {}}),
    ("chain", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": INTEGER}}, 1, "a"),
    ("other keyword", {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": INTEGER}}}, 1, "a"),
    ("title beside", {"$ref": "#/$defs/a", "title": "A", "$defs": {"a": INTEGER}}, 1, "a"),
    ("true", {"$ref": "#/$defs/a", "$defs": {"a": True}}, "a", Text("a")),
    ("unused gap", {"$ref": "#/$defs/a", "$defs": {"a": INTEGER, "b": {"not": {}}, "c": {"$ref": "#/no"}}}, 1, "a"),
]


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
        ({"$ref": "#/$defs/a~2", "$defs": {"a~2": {}}}, "'~' without 0 or 1"),
        ({"$ref": "#/$defs/a/type", "$defs": {"a": INTEGER}}, "leads to str, which is no schema"),
        ({"$ref": "#/anyOf/01", "anyOf": [INTEGER]}, "no '01'"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "refers to itself"),
        ({"$ref": 3}, "it must be text"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "x"}, "b": {"$id": "x"}}}, "name of another part"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, r"at #/\$defs/a: 'not' is not enforced"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        guide(schema)


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
    ({**STRING, "pattern": "x^a"}, "its ends only"),
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
    ({**OBJECT, "patternProperties": {"a^b": INTEGER}}, "its ends only"),
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
def test_what_no_grammar_enforces_is_refused_by_name(schema: Any, reason: str) -> None:
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
    r"""xgrammar takes all digits behind \x for one number, so that \x0022 is a quotation mark."""
    with pytest.raises(InvalidRequestError, match=r"\\x with more than two"):
        everything().compile(SamplingParams(regex=regex))
    with pytest.raises(InvalidRequestError, match=r"\\x with more than two"):
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
        (properties(513, additionalProperties=True), "513 properties stand beside additional ones"),
        (properties(513, unevaluatedProperties=STRING), "513 properties stand beside additional ones"),
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
