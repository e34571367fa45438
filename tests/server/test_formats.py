"""Texts that follow a format: JSON, schemas, regular expressions, grammars and choices."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from serving import NAME, events

URL = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 60, "seed": 5}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def text_of(http: httpx.Client, **fields: Any) -> str:
    answer = http.post(URL, json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"]
    return text


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"json_schema": SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_schemas(http: httpx.Client, fields: dict[str, Any]) -> None:
    found = json.loads(text_of(http, **fields))
    assert found.keys() == {"a", "b"}
    assert 0 <= found["a"] <= 99
    assert found["b"] in ("x", "yy")


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_objects(http: httpx.Client, fields: dict[str, Any]) -> None:
    # short, so that a random text ends in time
    biases = {"logit_bias": {str(token): 50 for token in _ids("{}")}}
    assert isinstance(json.loads(text_of(http, **fields, **biases)), dict)


def _ids(text: str) -> list[int]:
    from serving import tiny_tokenizer

    ids: list[int] = tiny_tokenizer().encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize("name", ["guided_regex", "regex", "structured_outputs"])
def test_regular_expressions(http: httpx.Client, name: str) -> None:
    fields = {name: {"regex": "[ab]{3}-[0-9]"} if name == "structured_outputs" else "[ab]{3}-[0-9]"}
    assert re.fullmatch("[ab]{3}-[0-9]", text_of(http, **fields))


@pytest.mark.parametrize("name", ["guided_choice", "structured_outputs"])
@pytest.mark.parametrize("choices", [["yes", "no"], ['a "quoted" \\ one', "日本\n"], ["👍", "👎"], ["𠮷野家", "𩸽"]])
def test_choices(http: httpx.Client, name: str, choices: list[str]) -> None:
    fields: dict[str, Any] = {name: choices} if name == "guided_choice" else {name: {"choice": choices}}
    assert text_of(http, **fields) in choices


@pytest.mark.parametrize("name", ["guided_grammar", "grammar", "ebnf"])
def test_grammars(http: httpx.Client, name: str) -> None:
    assert text_of(http, **{name: 'root ::= "x" "y"*'}) in ["x" + "y" * count for count in range(60)]


def test_a_streamed_format(http: httpx.Client) -> None:
    body = {**BODY, "stream": True, "guided_regex": "[ab]{5}"}
    text = "".join(
        choice["delta"].get("content", "") for chunk in events(http, URL, body) for choice in chunk["choices"]
    )
    assert re.fullmatch("[ab]{5}", text)


UNIQUE: dict[str, Any] = {"type": "array", "items": {"const": 1}, "uniqueItems": True, "minItems": 2, "maxItems": 2}


@pytest.mark.parametrize("name", ["response_format", "guided_json"])
def test_what_no_grammar_enforces_is_named_and_the_text_is_checked(http: httpx.Client, name: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": UNIQUE}}
    answer = http.post(URL, json={**BODY, name: wanted if name == "response_format" else UNIQUE})
    assert answer.json()["choices"][0]["message"]["content"] == "[1, 1]"
    warnings = answer.headers.get_list("warning")
    assert any(
        f"'{name}' is not enforced in part" in warning and "'uniqueItems' at #" in warning for warning in warnings
    )
    assert any("a text breaks its schema: 'uniqueItems' at #" in warning for warning in warnings)


def test_a_strict_format_that_no_grammar_enforces_is_refused(http: httpx.Client) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": UNIQUE, "strict": True}}
    answer = http.post(URL, json={**BODY, "response_format": wanted})
    assert answer.status_code == 400
    assert "'uniqueItems' at #" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_grammar": "root ::= “a”"}, "guided_grammar", "line 1, column 10"),
        ({"guided_regex": "[]a]"}, "guided_regex", "a class begins with ]"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "'type' is 'strin'"),
        ({"allowed_token_ids": _ids("a"), "bad_words": ["a"]}, "allowed_token_ids", "no token agrees with"),
        ({"guided_choice": ["a"], "min_tokens": 9}, "min_tokens", "no token agrees with min_tokens and grammar"),
    ],
)
def test_formats_without_a_text_are_refused_with_the_reason(
    http: httpx.Client, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = http.post(URL, json={**BODY, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == param
    assert "/cpp/" not in error["message"]


def test_text_is_free(http: httpx.Client) -> None:
    plain, given = ({**BODY, "max_tokens": 8}, {**BODY, "max_tokens": 8, "response_format": {"type": "text"}})
    texts = [http.post(URL, json=body).json()["choices"][0]["message"]["content"] for body in (plain, given)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": "x", "regex": "a"}}, "structured_outputs.whitespace_pattern"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
    ],
)
def test_refused_formats(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post(URL, json={**BODY, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
