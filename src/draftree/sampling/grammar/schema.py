"""JSON schemas of users: parsed and bounded before recursive code reads them, references resolved, texts checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from draftree.sampling.grammar.ebnf import require_length
from draftree.sampling.grammar.languages import Language, Languages
from draftree.sampling.grammar.regex import language, parse

MAX_DEPTH = 64  # levels of objects and arrays in a schema; a nested object takes two, one for its 'properties'
MAX_VALUES = 8192  # objects, arrays, strings, numbers and constants in a schema; keywords are not counted
MAX_CHARACTERS = 2**18  # length of a schema as JSON text


def schema_text(value: Any) -> str:
    """Return the JSON text of a schema: a mapping, JSON text, or a class with `model_json_schema` (pydantic)."""
    if callable(model_json_schema := getattr(value, "model_json_schema", None)):
        try:
            value = model_json_schema()
        except Exception as error:  # user code, which may raise anything
            raise ValueError(f"model_json_schema() raised {error!r}") from error
    if isinstance(value, str):
        value = value.removeprefix("\ufeff")
        require_length(value, MAX_CHARACTERS)
        try:
            value = json.loads(value, object_pairs_hook=_without_duplicates)
        except RecursionError:
            raise _too_deep() from None
    if not isinstance(value, Mapping):
        raise ValueError(f"a schema is an object, not {type(value).__name__}")
    _require_bounded(value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except TypeError as error:
        raise ValueError(str(error)) from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[error.start]!r} is half of a surrogate pair, which is not a character") from error
    require_length(text, MAX_CHARACTERS)
    return text


def _require_bounded(value: Any) -> None:
    """Bound depth and number of values, without recursion: the value may be of any depth, or contain itself."""
    level, depth, count = [value], 0, 0
    while level:
        count += len(level)
        if count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values: split it, or give a pattern for a long enum")
        containers = [part for part in level if isinstance(part, Mapping | list | tuple)]
        depth += bool(containers)
        if depth > MAX_DEPTH:
            raise _too_deep()
        level = []
        for part in containers:
            values = part.values() if isinstance(part, Mapping) else part
            level.extend(values if len(part) <= MAX_VALUES else [None] * len(part))


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MAX_DEPTH} levels: flatten it, or use a recursive $ref")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name!r} occurs twice in one object")
        values[name] = value
    return values


# References of JSON Schema (`$ref`, `$id`, `$anchor`, JSON pointers), resolved within one document.
#
# Source: JSON Schema 2020-12 core, sections 8.2 and 9; JSON Pointer, RFC 6901.

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that map names to schemas."""
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")  # keywords that hold a list of schemas
SINGLE = frozenset({"items", "additionalProperties", "propertyNames", "unevaluatedItems", "additionalItems"}).union(
    {"unevaluatedProperties", "contains", "contentSchema", "not", "if", "then", "else"}
)
"""Keywords that hold one schema."""


class SchemaError(ValueError):
    """A schema that cannot be represented by a grammar.

    Args:
        path: JSON pointer of the part at fault, as in `#/properties/name`.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"at {path}: {reason}")


class References:
    """Resolves the references of one schema document of bounded depth."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._bases: dict[int, str] = {}
        self._paths: dict[int, str] = {}
        self._by_uri: dict[str, Any] = {"": root}
        self._targets: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}
        self._index(root, "", "#")

    def follow(self, schema: Any) -> Any:
        """Return the schema at the end of a chain of references."""
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
        uris = []
        anchors = [schema.get("$anchor"), schema.get("$dynamicAnchor")]
        name = schema.get("$id")
        if isinstance(name, str) and name.startswith("#"):  # an anchor, up to draft 7
            anchors.append(name[1:] or None)
        elif isinstance(name, str):
            base = urldefrag(urljoin(base, name)).url
            uris.append(base)
        uris += [f"{base}#{anchor}" for anchor in anchors if isinstance(anchor, str)]
        for uri in uris:
            if self._by_uri.setdefault(uri, schema) is not schema:
                raise SchemaError(path, f"{uri!r} is also the name of another part of the schema")
        self._bases[id(schema)], self._paths[id(schema)] = base, path
        for keys, part in _parts(schema):
            self._index(part, base, "/".join([path, *(key.replace("~", "~0").replace("/", "~1") for key in keys)]))

    def path_of(self, schema: Any) -> str:
        return self._paths.get(id(schema), "#")

    def target(self, schema: dict[str, Any]) -> Any:
        if id(schema) not in self._targets:
            self._targets[id(schema)] = self._find(schema["$ref"], self._bases[id(schema)], self._paths[id(schema)])
        return self._targets[id(schema)]

    def _find(self, ref: Any, base: str, path: str) -> Any:
        if not isinstance(ref, str):
            raise SchemaError(path, f"'$ref' is {ref!r}: it must be text")
        # urljoin drops the base of schemes that it does not know, such as urn:
        uri, fragment = urldefrag(base + ref if ref.startswith("#") else urljoin(base, ref) if ref else base)
        if uri not in self._by_uri:
            raise SchemaError(
                path, f"'$ref' {ref!r} is in another document, and none is loaded: put that schema under '$defs'"
            )
        if not fragment or fragment.startswith("/"):
            return self._at_pointer(self._by_uri[uri], unquote(fragment), f"'$ref' {ref!r}", path)
        anchor = f"{uri}#{unquote(fragment)}"
        if anchor not in self._by_uri:
            raise SchemaError(path, f"'$ref' {ref!r} names an anchor that the schema does not have")
        return self._by_uri[anchor]

    def _at_pointer(self, resource: dict[str, Any], pointer: str, what: str, path: str) -> Any:
        part: Any = resource
        base, place = self._bases[id(resource)], self._paths[id(resource)]
        for escaped in pointer.split("/")[1:]:
            if re.search("~(?![01])", escaped):
                raise SchemaError(path, f"{what} has '~' that is not followed by 0 or 1: write ~0 for '~', ~1 for '/'")
            key = escaped.replace("~1", "/").replace("~0", "~")
            if isinstance(part, list):
                is_index = re.fullmatch("0|[1-9][0-9]{0,8}", key) and int(key) < len(part)
                part = part[int(key)] if is_index else None
            else:
                part = part.get(key) if isinstance(part, dict) else None
            if part is None:
                raise SchemaError(path, f"{what} has no target: there is no {key!r}")
            place = f"{place}/{escaped}"
            base = self._bases.get(id(part), base)
        if not isinstance(part, dict | bool):
            raise SchemaError(path, f"{what} leads to {type(part).__name__}, which is not a schema")
        # schemas under keywords outside JSON Schema are indexed once a reference leads to them
        self._index(part, base, place)
        return part


def _parts(schema: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the schemas directly inside a schema, with the keys that lead to them."""
    for word, part in schema.items():
        if word in NAMED and isinstance(part, dict):
            yield from (((word, name), schema) for name, schema in part.items())
        elif (word in LISTED or word == "items") and isinstance(part, list):
            yield from (((word, str(index)), schema) for index, schema in enumerate(part))
        elif word in SINGLE:
            yield (word,), part


MAX_VIOLATIONS = 8
UNCHECKED = "what the schema says beyond its grammar cannot be checked"


def violations(schema: str, text: str, *, has_prefix: bool = False) -> tuple[str, ...]:
    """Return the keywords of a schema that a text breaks, each with its place; none of the text itself."""
    try:
        value = _last_value(text) if has_prefix else json.loads(text)
    except ValueError:
        return ("the text is not JSON",)
    broken: dict[str, None] = {}
    try:
        for error in validator_of(json.loads(schema)).iter_errors(value):
            place = "/".join(["#", *map(str, list(error.absolute_schema_path)[:-1])])
            broken[f"'{error.validator}' at {place}"] = None
            if len(broken) == MAX_VIOLATIONS:
                break
    except Exception as error:  # of a reference, or of a schema that contains itself in place
        return (f"{UNCHECKED} ({type(error).__name__})",)
    return tuple(broken)


def _last_value(text: str) -> Any:
    """Return the JSON value at the end of a text."""
    decoder, text = json.JSONDecoder(), text.rstrip()
    for start in re.finditer(r'[\[{"\-0-9tfn]', text):
        with suppress(ValueError):
            value, end = decoder.raw_decode(text, start.start())
            if end == len(text):
                return value
    raise ValueError("no JSON value")


def validator_of(schema: Any) -> Any:
    """Return a validator of jsonschema that loads nothing, and whose patterns take linear time.

    Names of properties that are given by patterns are not checked: their grammar is exact.
    """
    from jsonschema.validators import extend, validator_for
    from referencing import Registry

    kind = validator_for(schema, default=_draft_of(schema))
    ignored = ("patternProperties", "additionalProperties", "unevaluatedProperties")
    checks = {"pattern": _pattern, **{word: _beside_patterns(kind, word) for word in ignored}}
    return extend(kind, checks)(schema, registry=Registry())


def _draft_of(schema: Any) -> Any:
    """Return the validator of the draft whose forms a schema without `$schema` has."""
    from jsonschema.validators import Draft4Validator, Draft7Validator, Draft202012Validator

    draft = Draft202012Validator
    pending = [schema]
    for part in pending:
        if isinstance(part, dict):
            if any(isinstance(part.get(word), bool) for word in ("exclusiveMinimum", "exclusiveMaximum")):
                return Draft4Validator
            draft = Draft7Validator if isinstance(part.get("items"), list) else draft
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)
    return draft


def _beside_patterns(kind: Any, word: str) -> Any:
    """Return jsonschema's check of a keyword, for schemas without patterns of names, which it would match by `re`."""
    check = kind.VALIDATORS.get(word)

    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if check is not None and "patternProperties" not in schema:
            yield from check(validator, value, instance, schema) or ()

    return checked


def _pattern(validator: Any, pattern: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if isinstance(instance, str) and isinstance(pattern, str):
        languages, texts = _language(pattern)
        if not languages.matches(texts, instance):
            yield ValidationError("the text does not match the pattern")


@lru_cache(16)
def _language(pattern: str) -> tuple[Languages, Language]:
    languages = Languages()
    return languages, language(parse(pattern), languages, is_search=True)
