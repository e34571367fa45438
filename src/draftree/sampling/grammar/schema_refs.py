"""References of JSON Schema (`$ref`, `$id`, `$anchor`, JSON pointers), resolved within one document.

Source: JSON Schema 2020-12 core, sections 8.2 and 9; JSON Pointer, RFC 6901.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that map names to schemas."""
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords that hold a list of schemas."""
SINGLE = (
    "items",
    "additionalProperties",
    "propertyNames",
    "unevaluatedItems",
    "additionalItems",
    "unevaluatedProperties",
    "contains",
    "contentSchema",
    "not",
    "if",
    "then",
    "else",
)
"""Keywords that hold one schema."""


class SchemaError(ValueError):
    """A schema that cannot be represented by a grammar.

    Args:
        path: JSON pointer of the part at fault, as in `#/properties/name`.
        reason: what is wrong with the part.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"at {path}: {reason}")


class References:
    """Resolves the references of one schema document.

    Args:
        root: the document; bounded in depth. Not mutated.

    Raises:
        SchemaError: two parts have the same `$id` or anchor.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._bases: dict[int, str] = {}
        self._paths: dict[int, str] = {}
        self._by_uri: dict[str, Any] = {"": root}
        self._targets: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}
        self._index(root, "", "#")

    def follow(self, schema: Any) -> Any:
        """Return the schema at the end of a chain of references.

        Raises:
            SchemaError: a reference has no target, or refers to itself.
        """
        seen: set[int] = set()
        while isinstance(schema, dict) and "$ref" in schema:
            if id(schema) in seen:
                raise SchemaError(self._paths[id(schema)], f"'$ref' {schema['$ref']!r} refers to itself")
            seen.add(id(schema))
            # the cached end of a chain is used at once: chains are long where each part refers to the next
            schema = self._ends[id(schema)] if id(schema) in self._ends else self.target(schema)
        self._ends.update(dict.fromkeys(seen, schema))
        return schema

    def _index(self, schema: Any, base: str, path: str) -> None:
        """Record base URIs, paths and names of a schema and of all nested schemas."""
        if not isinstance(schema, dict) or id(schema) in self._bases:
            return
        given = schema.get("$id")
        if isinstance(given, str) and not given.startswith("#"):
            base = urldefrag(urljoin(base, given)).url
            self._name(base, schema, path)
        anchors = [schema.get("$anchor"), schema.get("$dynamicAnchor")]
        if isinstance(given, str) and len(given) > 1 and given.startswith("#"):
            anchors.append(given[1:])
        for anchor in anchors:
            if isinstance(anchor, str):
                self._name(f"{base}#{anchor}", schema, path)
        self._bases[id(schema)], self._paths[id(schema)] = base, path
        for keys, part in _parts(schema):
            self._index(part, base, "/".join([path, *map(_escaped, keys)]))

    def _name(self, uri: str, schema: Any, path: str) -> None:
        other = self._by_uri.setdefault(uri, schema)
        if other is not schema:
            raise SchemaError(path, f"{uri!r} is also the name of another part of the schema")

    def path_of(self, schema: Any) -> str:
        """Return the JSON pointer of a schema of the document."""
        return self._paths.get(id(schema), "#")

    def target(self, schema: dict[str, Any]) -> Any:
        """Return the schema that a reference leads to.

        Raises:
            SchemaError: there is none.
        """
        if id(schema) not in self._targets:
            self._targets[id(schema)] = self._find(schema)
        return self._targets[id(schema)]

    def _find(self, schema: dict[str, Any]) -> Any:
        path, ref = self._paths[id(schema)], schema["$ref"]
        if not isinstance(ref, str):
            raise SchemaError(path, f"'$ref' is {ref!r}: it must be text")
        base = self._bases[id(schema)]
        # urljoin drops the base of schemes that it does not know, such as urn:
        joined = base + ref if ref.startswith("#") else urljoin(base, ref) if ref else base
        uri, fragment = urldefrag(joined)
        if uri not in self._by_uri:
            raise SchemaError(
                path, f"'$ref' {ref!r} is in another document, and none is loaded: put that schema under '$defs'"
            )
        if fragment and not fragment.startswith("/"):
            anchor = f"{uri}#{unquote(fragment)}"
            if anchor not in self._by_uri:
                raise SchemaError(path, f"'$ref' {ref!r} names an anchor that the schema does not have")
            return self._by_uri[anchor]
        return self._at_pointer(self._by_uri[uri], unquote(fragment), f"'$ref' {ref!r}", path)

    def _at_pointer(self, resource: dict[str, Any], pointer: str, what: str, path: str) -> Any:
        found: Any = resource
        base, place = self._bases[id(resource)], self._paths[id(resource)]
        for escaped in pointer.split("/")[1:]:
            if re.search("~(?![01])", escaped):
                raise SchemaError(path, f"{what} has '~' that is not followed by 0 or 1: write ~0 for '~', ~1 for '/'")
            key = escaped.replace("~1", "/").replace("~0", "~")
            found = _member(found, key)
            if found is None:
                raise SchemaError(path, f"{what} has no target: there is no {key!r}")
            place = f"{place}/{escaped}"
            if isinstance(found, dict):
                base = self._bases.get(id(found), base)
        if not isinstance(found, dict | bool):
            raise SchemaError(path, f"{what} leads to {type(found).__name__}, which is not a schema")
        # schemas under keywords outside JSON Schema are indexed once a reference leads to them
        self._index(found, base, place)
        return found


def _parts(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the schemas directly inside a schema, with the keys that lead to them."""
    for word, part in schema.items():
        if word in NAMED and isinstance(part, dict):
            yield from (((word, name), one) for name, one in part.items())
        elif (word in LISTED or word == "items") and isinstance(part, list):
            yield from (((word, str(index)), one) for index, one in enumerate(part))
        elif word in SINGLE:
            yield (word,), part


def _member(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list) and re.fullmatch("0|[1-9][0-9]{0,8}", key) and int(key) < len(value):
        return value[int(key)]
    return None


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
