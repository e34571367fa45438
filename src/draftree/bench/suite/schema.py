"""Validation by the part of JSON Schema that submissions use, so that a check needs no further package. No torch.

Keywords: type, const, enum, required, properties, additionalProperties, items, minItems, minimum, exclusiveMinimum,
pattern, minLength. A schema with others is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["violations"]

IGNORED = {"$schema", "$id", "title", "description", "$defs"}
KNOWN = {
    "$ref",
    "type",
    "const",
    "enum",
    "required",
    "properties",
    "additionalProperties",
    "items",
    "minItems",
    "minimum",
    "exclusiveMinimum",
    "pattern",
    "minLength",
}
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int,),
}
MOST = 20
"""Violations that are reported."""


def violations(value: Any, schema: Mapping[str, Any]) -> list[str]:
    """Return the first violations of a schema, each with the place of the value.

    Raises:
        ValueError: the schema has a keyword that is not known here.
    """
    found = []
    for problem in _violations(value, schema, "", schema.get("$defs", {})):
        found.append(problem)
        if len(found) == MOST:
            break
    return found


def _violations(value: Any, schema: Mapping[str, Any], place: str, shared: Mapping[str, Any]) -> Iterator[str]:
    unknown = schema.keys() - KNOWN - IGNORED
    if unknown:
        raise ValueError(f"the schema has unknown keywords: {sorted(unknown)}")
    where = place or "the document"
    if "$ref" in schema:
        yield from _violations(value, shared[schema["$ref"].removeprefix("#/$defs/")], place, shared)
        return
    if "type" in schema:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(_is_a(value, one) for one in types):
            yield f"{where} is not of type {' or '.join(types)}"
            return
    if "const" in schema and value != schema["const"]:
        yield f"{where} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is not one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, dict):
        yield from _in_object(value, schema, place, shared)
    elif isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{where} has fewer than {schema['minItems']} entries"
        if "items" in schema:
            for index, item in enumerate(value):
                yield from _violations(item, schema["items"], f"{place}[{index}]", shared)
    elif isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"{where} is too short"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where} does not match {schema['pattern']}"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", -math.inf):
            yield f"{where} is less than {schema['minimum']}"
        if value <= schema.get("exclusiveMinimum", -math.inf):
            yield f"{where} is not above {schema['exclusiveMinimum']}"


def _in_object(
    value: Mapping[str, Any], schema: Mapping[str, Any], place: str, shared: Mapping[str, Any]
) -> Iterator[str]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place or 'the document'} has no '{name}'"
    for name, inner in value.items():
        below = f"{place}.{name}" if place else name
        if name in properties:
            yield from _violations(inner, properties[name], below, shared)
        elif others is False:
            yield f"{below} is not a field of the format"
        elif isinstance(others, Mapping):
            yield from _violations(inner, others, below, shared)


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[kind])
