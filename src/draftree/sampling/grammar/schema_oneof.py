"""Mutual exclusion of schemas: if they exclude each other, `oneOf` equals `anyOf`, which a grammar can enforce."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, final

ALL_TYPES = frozenset({"string", "integer", "number", "array", "object", "boolean", "null"})
IMPLY_OBJECT = frozenset({"properties", "additionalProperties", "unevaluatedProperties"})
"""Without a 'type', xgrammar treats a schema with one of these as an object's."""
IMPLY_ARRAY = frozenset({"items", "prefixItems", "unevaluatedItems"})
MAX_STEPS = 20_000
"""Maximum comparisons of two schemas for one 'oneOf', about half a second."""
MAX_LEVELS = 8
"""Maximum levels of objects and alternatives that are compared."""


@final
class Exclusion:
    """Compares schemas by type, by constants and by required properties.

    Args:
        follow: returns the schema at the end of a chain of references.
    """

    def __init__(self, follow: Callable[[Any], Any]) -> None:
        self._follow = follow
        self._steps = 0
        self._keys: dict[int, set[str]] = {}

    def overlap(self, branches: list[Any]) -> tuple[int, int] | None:
        """Return the indices of two schemas that one value may fit, as far as this can tell; None if there are none."""
        self._steps = 0
        pairs = ((first, second) for second in range(len(branches)) for first in range(second))
        return next((pair for pair in pairs if not self._exclude(branches[pair[0]], branches[pair[1]], 0)), None)

    def _exclude(self, one: Any, other: Any, level: int) -> bool:
        self._steps += 1
        one, other = self._follow(one), self._follow(other)
        if not isinstance(one, dict) or not isinstance(other, dict):
            return one is False or other is False
        if level > MAX_LEVELS or self._steps > MAX_STEPS:
            return False
        for mine, theirs in ((one, other), (other, one)):
            for word in ("anyOf", "oneOf", "allOf"):
                if isinstance(mine.get(word), list):
                    found = (self._exclude(part, theirs, level + 1) for part in mine[word])
                    return any(found) if word == "allOf" else all(found)
        constants, others = values_of(one), values_of(other)
        if constants is not None and others is not None:
            return self._keys_of(one, constants).isdisjoint(self._keys_of(other, others))
        common = types_of(one) & types_of(other)
        if common != {"object"} or constants is not None or others is not None:
            return not common
        both = sorted(_required(one) & _required(other))
        return any(self._exclude(one["properties"][name], other["properties"][name], level + 1) for name in both)

    def _keys_of(self, schema: dict[str, Any], values: list[Any]) -> set[str]:
        if id(schema) not in self._keys:
            self._keys[id(schema)] = set(map(_key, values))
        return self._keys[id(schema)]


def values_of(schema: dict[str, Any]) -> list[Any] | None:
    """The constants of a schema; None if it has none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def types_of(schema: dict[str, Any]) -> set[str]:
    """Return the types of the values that may fit a schema; 'number' includes 'integer'."""
    given, values = schema.get("type"), values_of(schema)
    if given is None and values is not None:
        return set(map(type_of, values))
    given = given or implied_type(schema)
    names = ALL_TYPES if given is None else given if isinstance(given, list) else [given]
    return {str(name) for name in names} | ({"integer"} if "number" in names else set())


def implied_type(schema: dict[str, Any]) -> str | None:
    """Return the type that xgrammar assumes for a schema without one; None for every type."""
    if IMPLY_OBJECT & set(schema):
        return "object"
    return "array" if IMPLY_ARRAY & set(schema) else None


def type_of(value: Any) -> str:
    """Return the JSON Schema type of a value; 'integer' for 1.0."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds = {str: "string", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _required(schema: dict[str, Any]) -> set[str]:
    required, named = schema.get("required"), schema.get("properties")
    return set(map(str, required)) & set(named) if isinstance(required, list) and isinstance(named, dict) else set()


def _key(value: Any) -> str:
    """Return the same text for values that JSON Schema treats as equal: 1 and 1.0, but not 1 and true."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
