"""Schemas, and what their grammars accept."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

from draftree import SamplingParams
from draftree.sampling.grammar.compiler import Grammars
from draftree.sampling.grammar.guide import Guide
from draftree.sampling.history import History

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
