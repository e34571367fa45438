"""JSON schemas as grammars, and the list of what a grammar cannot enforce.

A text is JSON on one line. Every text of a grammar follows the schema, but for the listed parts; some forms are left
out: the properties of an object have the order of the schema, and a schema that has keywords of one type and no `type`
is of that type. A conjunction of schemas (`allOf`, `$ref` beside other keywords) is compiled as one schema, whose
strings and numbers are intersections of regular languages.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, final

from draftree.sampling.grammar.ebnf import Encoding, Ref, Rules, as_json, as_text, literal
from draftree.sampling.grammar.languages import FORMATS, Automaton, Bound, Language, Languages, TooLargeError, numbers
from draftree.sampling.grammar.regex import language, parse
from draftree.sampling.grammar.schema import References, SchemaError, validator_of

__all__ = ["SchemaCompiler", "SchemaGrammar", "schema_grammar"]

MAX_RULES = 20_000
"""Maximum rules of one grammar."""
MAX_WIDE = 512
"""Maximum states, in one grammar, after which most characters may follow: compiling one takes some 8 ms for 49,000
tokens (one core of an AMD EPYC), so this many take 4 s. States of this kind come from bounds of a string's length."""
WIDE = 256
"""A state is wide if more characters than this lead to other states."""
MAX_COUNTED = 2048
"""Maximum properties of an object times its 'minProperties' or 'maxProperties'."""
MAX_PATTERNS = 4
"""Maximum patterns of names in one object: each set of them has rules of its own."""
MAX_PAIRS = 400
"""Maximum pairs of schemas that are compared for one 'oneOf'."""

STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
ARRAYS = frozenset({"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"})
OBJECTS = frozenset(
    {"properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"}
) | {
    "propertyNames",
    "minProperties",
    "maxProperties",
}
UNENFORCED = {
    "array": ("contains", "minContains", "maxContains", "uniqueItems"),
    "object": ("dependencies", "dependentRequired", "dependentSchemas"),
    "": ("$dynamicRef", "$recursiveRef", "if", "not"),
}
"""Keywords by the type that they are about; empty for all types."""
ANNOTATIONS = (
    frozenset({"$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "$vocabulary", "contentEncoding"})
    | {"contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description", "else", "examples"}
    | {
        "readOnly",
        "then",
        "title",
        "writeOnly",
    }
)
COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "enum", "type"})
ASSERTIONS = COMBINING.union(STRINGS, NUMBERS, ARRAYS, OBJECTS, *UNENFORCED.values())
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
TYPES_OF = {"string": STRINGS, "number": NUMBERS, "array": ARRAYS, "object": OBJECTS}


@final
@dataclass(frozen=True, slots=True)
class SchemaGrammar:
    """The grammar of a schema.

    Attributes:
        ebnf: the grammar, with the rule 'root'.
        unenforced: what narrows the texts and is not in the grammar, each with its place.
    """

    ebnf: str
    unenforced: tuple[str, ...]


@lru_cache(64)
def schema_grammar(text: str) -> SchemaGrammar:
    """Compile a schema."""
    rules = Rules()
    compiler = SchemaCompiler(rules)
    root = compiler.add(text)
    ebnf = rules.text(root)
    if ebnf is None:
        raise SchemaError("#", "no text follows the schema")
    return SchemaGrammar(ebnf, compiler.unenforced())


class _Item(NamedTuple):
    """A schema of a conjunction, without some of its keywords."""

    schema: Any
    dropped: frozenset[str] = frozenset()


@final
@dataclass(frozen=True, slots=True)
class Form:
    """How a value is written; JSON by default.

    Attributes:
        is_bare: a string is written without quotation marks and escapes, and has no "</".
        is_arguments: an object is written as XML-like parameters, with bare strings. Other values are not written.
    """

    is_bare: bool = False
    is_arguments: bool = False


PLAIN = Form()
BARE = Form(is_bare=True)
ARGUMENTS = Form(is_arguments=True)


@final
@dataclass(slots=True)
class _Layout:
    """Text around the members of an object."""

    start: str
    end: str
    between: str
    name: Callable[[str], str]
    after: str
    values: Form


_JSON_LAYOUT = _Layout("{", "}", ", ", lambda name: f"{_json(name)}: ", "", PLAIN)
_XML_LAYOUT = _Layout("", "", "", lambda name: f"<parameter={name}>\n", "\n</parameter>\n", BARE)


@final
class SchemaCompiler:
    """Compiles schemas to rules of one grammar. Mutated by `add`."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._languages = Languages()
        self._root: Any = True
        self._references = References({})
        self._known: dict[Any, Ref] = {}
        self._pending: list[tuple[str, list[_Item], Form]] = []
        self._choices: list[tuple[list[_Item], list[_Item], str]] = []
        self._shared: dict[str, Ref] = {}
        self._added: dict[tuple[Language, Encoding, str], Ref | None] = {}
        self._reports: dict[str, None] = {}
        self._is_silent = False
        self._wide = 0

    def unenforced(self) -> tuple[str, ...]:
        """Return what narrows the texts and is not in the grammar, for all schemas so far."""
        return tuple(self._reports)

    def add(self, text: str, form: Form = PLAIN) -> Ref:
        """Add rules for the texts of a schema."""
        self._root = json.loads(text)
        self._references = References(self._root)
        self.__dict__.pop("_validator", None)
        self._known.clear()
        try:
            root = self._value([_Item(self._root)], form)
            self._define_pending()
            self._compare_choices()
        except TooLargeError as error:
            raise SchemaError("#", "its patterns and bounds together are too large: simplify them") from error
        return root

    def _define_pending(self) -> None:
        while self._pending:
            name, items, form = self._pending.pop()
            self._rules.define(name, self._alternatives(items, form))
            if len(self._rules) > MAX_RULES:
                raise SchemaError("#", f"it needs more than {MAX_RULES} rules: simplify it")

    def _compare_choices(self) -> None:
        """Report each 'oneOf' of which a text may fit several schemas."""
        pairs: list[tuple[Ref, str]] = []
        self._is_silent = True
        for others, branches, path in self._choices:
            if len(branches) * (len(branches) - 1) > 2 * MAX_PAIRS:
                pairs.append((self._any(), f"'oneOf' at {path}: it has too many schemas to compare"))
                continue
            for second in range(len(branches)):
                for first in range(second):
                    both = self._value([*others, branches[first], branches[second]], PLAIN)
                    pairs.append((both, f"'oneOf' at {path}: a text may fit the schemas at {first} and {second}"))
        self._choices.clear()
        self._define_pending()
        self._is_silent = False
        if pairs:
            productive = self._rules.productive()
            self._reports.update((report, None) for both, report in pairs if both.name in productive)

    def _report(self, item: _Item, what: str, reason: str = "") -> None:
        if not self._is_silent:
            place = self._references.path_of(item.schema)
            self._reports[f"{what} at {place}" + (f": {reason}" if reason else "")] = None

    # conjunctions

    def _flattened(self, items: Iterable[_Item]) -> list[_Item] | None:
        """Return the schemas of a conjunction, along references and 'allOf'; None if it has `false`."""
        found: dict[tuple[int, frozenset[str]], _Item] = {}
        pending = list(items)
        for item in pending:
            schema, dropped = item
            if schema is False:
                return None
            if schema is True or (id(schema), dropped) in found:
                continue
            if not isinstance(schema, dict):
                raise SchemaError("#", f"{_shown(schema)} is not a schema: it must be an object, true or false")
            found[id(schema), dropped] = item
            self._report_typos(item)
            if "$ref" in schema and "$ref" not in dropped:
                self._references.follow(schema)
                pending.append(_Item(self._references.target(schema)))
            if "allOf" in schema and "allOf" not in dropped:
                pending.extend(map(_Item, self._get(item, "allOf", list)))
        return [item for item in found.values() if self._words(item) - {"$ref", "allOf"}]

    def _words(self, item: _Item) -> set[str]:
        return (set(item.schema) & ASSERTIONS) - item.dropped

    def _get(self, item: _Item, word: str, *kinds: type) -> Any:
        """Return the value of a keyword."""
        value = item.schema[word]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
            wanted = " or ".join(dict.fromkeys(names.get(kind, "a number") for kind in kinds))
            path = self._references.path_of(item.schema)
            raise SchemaError(path, f"'{word}' is {_shown(value)}: it must be {wanted}")
        return value

    def _all(self, items: list[_Item], word: str, *kinds: type) -> list[Any]:
        return [self._get(item, word, *kinds) for item in items if word in self._words(item)]

    def _value(self, items: Iterable[_Item], form: Form) -> Ref:
        """Return the rule of the values that fit all schemas."""
        flat = self._flattened(items)
        if flat is None:
            return self._nothing()
        if not flat and not form.is_bare and not form.is_arguments:
            return self._any()
        key = (form, frozenset((id(item.schema), item.dropped) for item in flat))
        if key not in self._known:
            name = self._rules.reserve()
            self._known[key] = Ref(name)
            self._pending.append((name, flat, form))
        return self._known[key]

    def _alternatives(self, items: list[_Item], form: Form) -> list[list[str | Ref]]:
        for place, item in enumerate(items):
            for word in ("anyOf", "oneOf"):
                if word in self._words(item):
                    branches = [_Item(branch) for branch in self._get(item, word, list)]
                    rest = _Item(item.schema, item.dropped | {word})
                    others = [*items[:place], rest, *items[place + 1 :]]
                    if word == "oneOf" and len(branches) > 1 and not self._is_silent:
                        self._choices.append((others, branches, self._references.path_of(item.schema)))
                    return [[self._value([*others, branch], form)] for branch in branches]
        values = self._values(items)
        types = self._types(items)
        if values is not None:
            fitting = types | ({"integer"} if "number" in types else set())
            # OpenAPI 3.0 writes null so; elsewhere `nullable` is an annotation
            fitting |= {"null"} if any(item.schema.get("nullable") is True for item in items) else set()
            return self._constants([value for value in values if type_of(value) in fitting], items, form)
        self._report_unenforced(items, types)
        return [[self._of_type(kind, items, form)] for kind in TYPES if kind in types]

    def _of_type(self, kind: str, items: list[_Item], form: Form) -> str | Ref:
        if kind == "object":
            return self._object(items, _XML_LAYOUT if form.is_arguments else _JSON_LAYOUT)
        if form.is_arguments:
            return self._nothing()
        if kind == "string":
            return self._string(items, is_bare=form.is_bare)
        if kind == "array":
            return self._array(items)
        if kind in ("null", "boolean"):
            return '"null"' if kind == "null" else '("true" | "false")'
        return self._number(items, is_integer=kind == "integer")

    def _types(self, items: list[_Item]) -> set[str]:
        """Return the types of the values; 'number' stands for all numbers, 'integer' for those alone."""
        given = [value if isinstance(value, list) else [value] for value in self._all(items, "type", str, list)]
        for item, names in zip([item for item in items if "type" in self._words(item)], given, strict=True):
            for name in names:
                if name not in TYPES:
                    path = self._references.path_of(item.schema)
                    raise SchemaError(path, f"'type' is {_shown(name)}: it must be one of {', '.join(TYPES)}")
        types = set(TYPES)
        for names in given:
            types &= {*names, *(["integer"] if "number" in names else [])}
        words = set().union(*map(self._words, items))
        implied = {kind for kind, keywords in TYPES_OF.items() if keywords & words}
        if not given and implied and not words & {"enum", "const"}:
            types = implied | ({"integer"} if "number" in implied else set())
        for item in items:
            if "not" in self._words(item):
                types -= self._excluded(item) or set()
        return types - {"integer"} if "number" in types else types

    def _excluded(self, item: _Item) -> set[str] | None:
        """Return the types that 'not' excludes; None if it excludes other values."""
        inner = self._get(item, "not", dict, bool)
        words = set() if isinstance(inner, bool) else set(inner) & ASSERTIONS
        if not words:
            return set() if inner is False else set(TYPES)
        names = inner.get("type")
        excluded = {names} if isinstance(names, str) else set(names or ())
        if words != {"type"} or ("integer" in excluded and "number" not in excluded):
            return None
        return excluded | ({"integer"} if "number" in excluded else set())

    def _report_unenforced(self, items: list[_Item], types: set[str]) -> None:
        for item in items:
            for kind, words in UNENFORCED.items():
                for word in words:
                    if word not in self._words(item) or (kind and kind not in types):
                        continue
                    if word == "not" and self._excluded(item) is not None:
                        continue
                    if word == "uniqueItems" and (item.schema[word] is False or self._most_items(items) in (0, 1)):
                        continue
                    if word not in ("minContains", "maxContains"):
                        self._report(item, f"'{word}'")

    def _report_typos(self, item: _Item) -> None:
        for word in item.schema:
            if word not in ASSERTIONS and word not in ANNOTATIONS and not word.startswith("x-"):
                close = difflib.get_close_matches(word, ASSERTIONS, n=1, cutoff=0.85)
                if close:
                    self._report(item, f"'{word}'", f"no keyword of JSON Schema (did you mean '{close[0]}'?)")

    # constants

    def _values(self, items: list[_Item]) -> list[Any] | None:
        """Return the values that all 'enum' and 'const' allow; None without them."""
        lists = [[item.schema["const"]] for item in items if "const" in self._words(item)]
        for item in items:
            if "enum" in self._words(item):
                lists.append(self._get(item, "enum", list))
                if not lists[-1]:
                    raise SchemaError(self._references.path_of(item.schema), "'enum' is empty: give at least one value")
        if not lists:
            return None
        found = {_key(value): value for value in lists[0]}
        for values in lists[1:]:
            keys = set(map(_key, values))
            found = {key: value for key, value in found.items() if key in keys}
        return list(found.values())

    def _constants(self, values: list[Any], items: list[_Item], form: Form) -> list[list[str | Ref]]:
        others = [item for item in items if self._words(item) - {"enum", "const", "type"}]
        if others:
            values = [value for value in values if all(self._fits(item, value) for item in others)]
        if form.is_arguments:
            raise SchemaError("#", "arguments that are constants are not supported in this format of calls")
        if form.is_bare:
            texts = [value if isinstance(value, str) else _json(value) for value in values]
            values = [value for value, text in zip(values, texts, strict=True) if "</" not in text]
            texts = [text for text in texts if "</" not in text]
            return [[literal(text)] for text in texts]
        return [[literal(_json(value))] for value in values]

    @cached_property
    def _validator(self) -> Any:
        return validator_of(self._root)

    def _fits(self, item: _Item, value: Any) -> bool:
        schema = {word: part for word, part in item.schema.items() if word not in item.dropped}
        try:
            return bool(self._validator.evolve(schema=schema).is_valid(value))
        except Exception as error:  # of a pattern that is not supported, or of a reference
            self._report(item, "a keyword beside 'enum' or 'const'", f"it cannot be checked ({type(error).__name__})")
            return True

    # strings

    def _string(self, items: list[_Item], *, is_bare: bool) -> Ref:
        made = self._languages
        encode = as_text if is_bare else as_json
        end = "" if is_bare else '"\\""'
        no_tag = made.complement(made.seq(made.anything, made.text("</"), made.anything))
        conditions = self._conditions(items)
        attempts = _attempts(conditions)
        reason = ""
        while kept := next(attempts):
            text = made.both(*(condition.language for condition in kept), *([no_tag] if is_bare else []))
            try:
                body = self._add_language(text, encode, end)
            except TooLargeError as error:
                reason = str(error)
                continue
            others = [condition for condition in kept if condition.word != "format"]
            if body is not None or len(others) == len(kept):
                break
            # a format says less than what contradicts it
            reason = "no text fits it and the other keywords"
            attempts = _attempts(others)
        for condition in conditions:
            if condition not in kept:
                self._report(
                    condition.item, f"'{condition.word}' {_shown(condition.item.schema[condition.word])}", reason
                )
        if not kept and is_bare:
            return self._share("bare", lambda: self._rules.add_language(made, no_tag, as_text))
        if not kept:
            return self._share("string", self._free_string)
        body = body or self._nothing()
        return body if is_bare else self._rules.add(['"\\""', body])

    def _free_string(self) -> Ref:
        """Return the rule of all JSON strings, escapes of whole surrogate pairs included."""
        hexadecimal = "[0-9A-Fa-f]"
        rest = self._rules.reserve()
        code = self._rules.add(
            ["[0-9A-CE-Fa-ce-f]", hexadecimal, hexadecimal, hexadecimal],
            ["[Dd] [0-7]", hexadecimal, hexadecimal],
            ["[Dd] [89ABab]", hexadecimal, hexadecimal, '"\\\\u" [Dd] [C-Fc-f]', hexadecimal, hexadecimal],
        )
        escape = self._rules.add(['["\\\\/bfnrt]'.replace('["', '[\\"')], ['"u"', code])
        plain = as_json(((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)))
        self._rules.define(rest, [['"\\""'], [*plain, Ref(rest)], ['"\\\\"', escape, Ref(rest)]])
        return self._rules.add(['"\\""', Ref(rest)])

    def _conditions(self, items: list[_Item]) -> list[_Condition]:
        """Return what narrows the strings; from the end on, they are left out if their automaton is too large."""
        made = self._languages
        found = []
        for item in items:
            if "pattern" in self._words(item):
                pattern = self._get(item, "pattern", str)
                try:
                    found.append(_Condition(item, "pattern", language(parse(pattern), made, is_search=True)))
                except ValueError as error:
                    self._report(item, f"'pattern' {_shown(pattern)}", str(error))
        for item in items:
            name = item.schema.get("format") if "format" in self._words(item) else None
            if isinstance(name, str) and name in FORMATS:
                text = language(parse(FORMATS[name]), made, is_search=False)
                found.append(_Condition(item, "format", text))
        for item in items:
            for word in ("minLength", "maxLength"):
                if word in self._words(item):
                    count = self._count(item, word)
                    bounds = (count, None) if word == "minLength" else (0, count)
                    text = made.repeat(made.character, *bounds)
                    if text is not made.anything:
                        found.append(_Condition(item, word, text))
        return [condition for condition in found if condition.language is not made.anything]

    def _count(self, item: _Item, word: str) -> int:
        value = self._get(item, word, int, float)
        if value < 0 or value != int(value):
            path = self._references.path_of(item.schema)
            raise SchemaError(path, f"'{word}' is {value}: it must be a whole number of at least 0")
        return int(value)

    def _add_language(self, text: Language, encode: Encoding, end: str = "") -> Ref | None:
        """Return the rule of a language, with `end` after each text; None if the language is empty."""
        key = (text, encode, end)
        if key not in self._added:
            automaton = self._languages.automaton(text)
            wide = 0 if self._is_silent else _wide_states(automaton)
            if self._wide + wide > MAX_WIDE:
                raise TooLargeError(f"with lengths up to {wide} it takes too long to compile")
            self._wide += wide
            self._added[key] = self._rules.add_automaton(automaton, encode, end=end) if automaton.steps else None
        return self._added[key]

    # numbers

    def _number(self, items: list[_Item], *, is_integer: bool) -> Ref:
        least = self._bound(items, "minimum", "exclusiveMinimum")
        most = self._bound(items, "maximum", "exclusiveMaximum")
        steps = [item for item in items if "multipleOf" in self._words(item)]
        multiples = [_decimal(self._get(item, "multipleOf", int, float)) for item in steps]
        for item, multiple in zip(steps, multiples, strict=True):
            if multiple <= 0:
                raise SchemaError(self._references.path_of(item.schema), "'multipleOf' must be above 0")
        if least is most is None and not multiples:
            return self._share("integer" if is_integer else "number", lambda: self._free_number(is_integer=is_integer))
        for steps_kept in (multiples, []):
            try:
                text = numbers(self._languages, least, most, steps_kept, is_integer=is_integer)
                return self._add_language(text, as_text) or self._nothing()
            except TooLargeError as error:
                reason = str(error)
                for item in items:
                    for word in ["multipleOf"] if steps_kept else sorted(NUMBERS - {"multipleOf"}):
                        if word in self._words(item):
                            self._report(item, f"'{word}'", reason)
        return self._share("integer" if is_integer else "number", lambda: self._free_number(is_integer=is_integer))

    def _free_number(self, *, is_integer: bool) -> Ref:
        whole = '"-"? ("0" | [1-9] [0-9]*)'
        return self._rules.add([whole if is_integer else f'{whole} ("." [0-9]+)? ([eE] [+\\-]? [0-9]+)?'])

    def _bound(self, items: list[_Item], word: str, strict_word: str) -> Bound | None:
        """Return the narrowest bound. In drafts up to 4, the strict keyword is true or false."""
        found = []
        for item in items:
            words = self._words(item)
            strict = self._get(item, strict_word, int, float, bool) if strict_word in words else False
            if word in words:
                found.append(Bound(_decimal(self._get(item, word, int, float)), is_strict=strict is True))
            if not isinstance(strict, bool):
                found.append(Bound(_decimal(strict), is_strict=True))
        sign = -1 if word == "maximum" else 1
        return max(found, key=lambda bound: (sign * bound.value, bound.is_strict), default=None)

    # arrays

    def _most_items(self, items: list[_Item]) -> int | None:
        return min((self._count(item, "maxItems") for item in items if "maxItems" in self._words(item)), default=None)

    def _array(self, items: list[_Item]) -> Ref:
        tuples = [self._tuple(item) for item in items]
        size = max((len(parts) for parts, _ in tuples), default=0)
        is_open = any(rest is not None for _, rest in tuples) or not size
        least = max((self._count(item, "minItems") for item in items if "minItems" in self._words(item)), default=0)
        most = self._most_items(items)
        if not is_open:
            most = size if most is None else min(size, most)
        # a tuple is written with all of its elements
        least = max(least, size if most is None else min(size, most))
        if most is not None and least > most:
            return self._nothing()
        elements = [
            self._value([_Item(_element(parts, rest, place)) for parts, rest in tuples], PLAIN)
            for place in range(min(size, least))
        ]
        rest = self._value([_Item(True if rest is None else rest) for _, rest in tuples], PLAIN)
        if not elements and most != 0:
            body = [rest, *self._more(rest, max(0, least - 1), None if most is None else most - 1)]
            empty: list[list[str | Ref]] = [['"[]"']] if least == 0 else []
            return self._rules.add(*empty, ['"["', *body, '"]"'])
        parts: list[str | Ref] = ['"["']
        for place, element in enumerate(elements):
            parts += ['", "', element] if place else [element]
        count = len(elements)
        parts += self._more(rest, least - count, None if most is None else most - count)
        return self._rules.add([*parts, '"]"'])

    def _more(self, element: Ref, least: int, most: int | None) -> list[str | Ref]:
        if most == 0:
            return []
        return [Ref(self._rules.add(['", "', element]).name, least, most)]

    def _tuple(self, item: _Item) -> tuple[list[Any], Any]:
        """Return the schemas of the first elements, and that of the others; None if it is not given."""
        words = self._words(item)
        parts = self._get(item, "prefixItems", list) if "prefixItems" in words else []
        rest = item.schema["items"] if "items" in words else None
        if isinstance(rest, list):
            parts, rest = rest, item.schema.get("additionalItems")
        if rest is None and "unevaluatedItems" in words:
            rest = item.schema["unevaluatedItems"]
        return parts, rest

    # objects

    def _object(self, items: list[_Item], layout: _Layout) -> Ref:
        members = _Members(self, items)
        names = list(dict.fromkeys([*members.named(), *members.required]))
        entries: list[_Entry] = []
        for name in names:
            value = self._value(members.schemas_of(name), layout.values)
            key = layout.name(name)
            if layout is _XML_LAYOUT and (set("<>=\n") & set(name) or not name):
                if name in members.required:
                    raise SchemaError("#", f"the format of calls has no place for the name {_shown(name)}")
                continue
            parts: list[str | Ref] = [literal(key), value, *([literal(layout.after)] if layout.after else [])]
            entries.append(_Entry(tuple(parts), name in members.required))
        pairs = [] if layout is _XML_LAYOUT else list(members.free(names, layout))
        pair = self._rules.add(*pairs) if pairs else None
        least, most = self._bounds_of_members(items, entries, pair)
        body = _Body(self._rules, layout, entries, pair, least, most).first()
        return self._rules.add([*_text(layout.start), *body, *_text(layout.end)])

    def _bounds_of_members(self, items: list[_Item], entries: list[_Entry], pair: Ref | None) -> tuple[int, int | None]:
        required = sum(entry.is_required for entry in entries)
        words = ("minProperties", "maxProperties")
        low, high = ([(self._count(item, word), item) for item in items if word in self._words(item)] for word in words)
        least = max((count for count, _ in low), default=0)
        most = min((count for count, _ in high), default=None)
        if least <= required:
            least = 0
        if most is not None and pair is None and most >= len(entries):
            most = None
        if max(least, most or 0) * len(entries) > MAX_COUNTED:
            for word, counts in zip(words, (low, high), strict=True):
                for _, item in counts:
                    self._report(item, f"'{word}'", f"{len(entries)} properties are too many to count")
            return 0, None
        if least > 1 and pair is not None and least > required + 1:
            for _, item in low:
                self._report(item, "'minProperties'", "free names may occur twice")
        return least, most

    def _names(self, items: Iterable[_Item]) -> Language:
        """Return the strings that fit all schemas."""
        made = self._languages
        flat = self._flattened(items)
        if flat is None:
            return made.nothing
        for place, item in enumerate(flat):
            for word in ("anyOf", "oneOf"):
                if word in self._words(item):
                    others = [*flat[:place], _Item(item.schema, item.dropped | {word}), *flat[place + 1 :]]
                    branches = self._get(item, word, list)
                    return made.alt(*(self._names([*others, _Item(branch)]) for branch in branches))
        if "string" not in self._types([*flat, _Item({"type": "string"})]):
            return made.nothing
        self._report_unenforced(flat, {"string"})
        values = self._values(flat)
        parts = [condition.language for condition in self._conditions(flat)]
        if values is not None:
            parts.append(made.alt(*(made.text(value) for value in values if isinstance(value, str))))
        return made.both(*parts)

    # shared rules

    def _share(self, name: str, add: Callable[[], Ref]) -> Ref:
        if name not in self._shared:
            self._shared[name] = add()
        return self._shared[name]

    def _nothing(self) -> Ref:
        """Return the rule without texts."""
        return self._share("nothing", self._rules.add)

    def _any(self) -> Ref:
        """Return the rule of all JSON values."""
        if "any" not in self._shared:
            self._shared["any"] = Ref(self._rules.reserve())
            value = self._shared["any"]
            string = self._share("string", self._free_string)
            number = self._share("number", lambda: self._free_number(is_integer=False))
            element = self._rules.add(['", "', value])
            member = self._rules.add([string, '": "', value])
            pair = self._rules.add(['", "', member])
            self._rules.define(
                value.name,
                [
                    ['"{}"'],
                    ['"{"', member, Ref(pair.name, 0, None), '"}"'],
                    ['"[]"'],
                    ['"["', value, Ref(element.name, 0, None), '"]"'],
                    [string],
                    [number],
                    ['"true"'],
                    ['"false"'],
                    ['"null"'],
                ],
            )
        return self._shared["any"]


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Condition:
    """A condition on strings, and the schema that has it."""

    item: _Item
    word: str
    language: Language


@final
@dataclass(frozen=True, slots=True)
class _Entry:
    """A listed property of an object."""

    parts: tuple[str | Ref, ...]
    is_required: bool


@final
class _Members:
    """The properties of an object that fits all schemas of a conjunction."""

    def __init__(self, compiler: SchemaCompiler, items: list[_Item]) -> None:
        self._compiler = compiler
        self._items = items
        made = compiler._languages
        self.required = {str(name) for names in compiler._all(items, "required", list) for name in names}
        self._named = [
            compiler._get(item, "properties", dict) if self._has(item, "properties") else {} for item in items
        ]
        self._patterns: list[list[tuple[Language, Any]]] = []
        for item in items:
            patterns = compiler._get(item, "patternProperties", dict) if self._has(item, "patternProperties") else {}
            self._patterns.append([])
            for pattern, schema in patterns.items():
                try:
                    self._patterns[-1].append((language(parse(pattern), made, is_search=True), schema))
                except ValueError as error:
                    compiler._report(item, f"'patternProperties' {_shown(pattern)}", str(error))
        names = [_Item(item.schema["propertyNames"]) for item in items if self._has(item, "propertyNames")]
        self._names = compiler._names(names) if names else made.anything
        self._has_others = any(self._has(item, "additionalProperties") for item in items)
        has_any = any(self._has(item, "unevaluatedProperties") for item in items) or self._has_others
        is_listed = any(self._has(item, word) for item in items for word in ("properties", "patternProperties"))
        # a schema that lists properties and does not mention others means no others
        self._is_open = has_any or not is_listed

    def _has(self, item: _Item, word: str) -> bool:
        return word in self._compiler._words(item)

    def named(self) -> Iterator[str]:
        """Yield the names of all properties in order."""
        for named in self._named:
            yield from named

    def schemas_of(self, name: str) -> list[_Item]:
        """Return the schemas of a listed property."""
        made = self._compiler._languages
        if not made.matches(self._names, name):
            return [_Item(False)]
        found = []
        is_evaluated = False
        for item, named, patterns in zip(self._items, self._named, self._patterns, strict=True):
            own = [named[name]] if name in named else []
            own += [schema for pattern, schema in patterns if made.matches(pattern, name)]
            is_evaluated |= bool(own)
            if not own and self._has(item, "additionalProperties"):
                own = [item.schema["additionalProperties"]]
            found += own
        if not is_evaluated:
            found += self._unevaluated()
        return [_Item(schema) for schema in found]

    def _unevaluated(self) -> list[Any]:
        if self._has_others:
            return []
        return [
            item.schema["unevaluatedProperties"] for item in self._items if self._has(item, "unevaluatedProperties")
        ]

    def free(self, listed: Sequence[str], layout: _Layout) -> Iterator[list[str | Ref]]:
        """Yield alternatives of a member whose name is not listed, by the patterns that its name matches."""
        made = self._compiler._languages
        compiler = self._compiler
        patterns = list(dict.fromkeys(pattern for own in self._patterns for pattern, _ in own))
        if len(patterns) > MAX_PATTERNS:
            for item in self._items:
                if self._has(item, "patternProperties"):
                    compiler._report(item, "'patternProperties'", f"{len(patterns)} patterns are too many to combine")
            patterns = patterns[:MAX_PATTERNS]
        unlisted = made.complement(made.alt(*map(made.text, listed))) if listed else made.anything
        for number in range(2 ** len(patterns)):
            chosen = {pattern for place, pattern in enumerate(patterns) if number >> place & 1}
            if not chosen and not self._is_open:
                continue
            schemas: list[Any] = [] if chosen else self._unevaluated()
            for item, own in zip(self._items, self._patterns, strict=True):
                matching = [schema for pattern, schema in own if pattern in chosen]
                if not matching and self._has(item, "additionalProperties"):
                    matching = [item.schema["additionalProperties"]]
                schemas += matching
            if any(schema is False for schema in schemas):
                continue
            others = (made.complement(pattern) for pattern in patterns if pattern not in chosen)
            name = made.both(self._names, unlisted, *chosen, *others)
            if name is made.nothing:
                continue
            value = compiler._value([_Item(schema) for schema in schemas], layout.values)
            key = self._key(name)
            if key is not None:
                yield [key, '": "', value]

    def _key(self, name: Language) -> Ref | None:
        compiler = self._compiler
        for text in (name, self._names):
            if text is compiler._languages.anything:
                return compiler._share("string", compiler._free_string)
            try:
                body = compiler._add_language(text, as_json, '"\\""')
            except TooLargeError as error:
                compiler._report(self._items[0], "free names of properties", str(error))
            else:
                return None if body is None else compiler._rules.add(['"\\""', body])
        return compiler._share("string", compiler._free_string)


@final
class _Body:
    """The members of an object: listed ones in order, then free ones; counted if there are bounds."""

    def __init__(
        self,
        rules: Rules,
        layout: _Layout,
        entries: list[_Entry],
        pair: Ref | None,
        least: int,
        most: int | None,
    ) -> None:
        self._rules, self._layout, self._entries, self._pair = rules, layout, entries, pair
        self._least, self._most = least, most
        self._known: dict[tuple[int, int], list[str | Ref]] = {}
        # from the end, so that the recursion is shallow
        for place in range(len(entries), -1, -1):
            for count in range(self._cap(place) + 1):
                self._rest(place, count)

    def _cap(self, count: int) -> int:
        """Return a count, cut where more makes no difference."""
        return min(count, self._least if self._most is None else self._most + 1)

    def first(self) -> list[str | Ref]:
        """Return the parts of the whole body."""
        parts = self._end(0, is_first=True)
        for place in range(len(self._entries) - 1, -1, -1):
            entry = self._entries[place]
            after = [*entry.parts, *self._rest(place + 1, self._cap(1))] if self._most != 0 else self._nothing()
            parts = after if entry.is_required else [self._rules.add(after, parts)]
        return parts

    def _nothing(self) -> list[str | Ref]:
        return [self._rules.add()]

    def _rest(self, place: int, count: int) -> list[str | Ref]:
        """Return the parts from an entry on, after at least one member; `count` members are written."""
        key = (place, count)
        if key not in self._known:
            if place == len(self._entries):
                self._known[key] = self._end(count, is_first=False)
                return self._known[key]
            entry = self._entries[place]
            following = self._cap(count + 1)
            if self._most is not None and following > self._most:
                written = self._nothing()
            else:
                written = [*_text(self._layout.between), *entry.parts, *self._rest(place + 1, following)]
            skipped = self._rest(place + 1, count)
            self._known[key] = written if entry.is_required else [self._rules.add(written, skipped)]
        return self._known[key]

    def _end(self, count: int, *, is_first: bool) -> list[str | Ref]:
        """Return the parts after the listed members: the free ones."""
        missing = max(0, self._least - count)
        room = None if self._most is None else self._most - count
        if self._pair is None or room == 0:
            return [] if not missing else self._nothing()
        more = self._rules.add([*_text(self._layout.between), self._pair])
        if not is_first:
            return [Ref(more.name, missing, room)]
        some: list[str | Ref] = [self._pair, Ref(more.name, max(0, missing - 1), None if room is None else room - 1)]
        return some if missing else [self._rules.add([], some)]


def _attempts(conditions: list[_Condition]) -> Iterator[list[_Condition]]:
    """Yield fewer and fewer conditions: first the last ones are left out, then all but one, at last all."""
    for count in range(len(conditions), 0, -1):
        yield conditions[:count]
    yield from ([condition] for condition in conditions[1:])
    yield []


def _wide_states(automaton: Automaton) -> int:
    sizes = (
        sum(high - low + 1 for target, ranges in steps.items() if target != state for low, high in ranges)
        for state, steps in enumerate(automaton.steps)
    )
    return sum(size > WIDE for size in sizes)


def _element(parts: list[Any], rest: Any, place: int) -> Any:
    return parts[place] if place < len(parts) else True if rest is None else rest


def _text(text: str) -> list[str | Ref]:
    return [literal(text)] if text else []


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _decimal(value: float) -> Decimal:
    return Decimal(repr(value))


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def type_of(value: Any) -> str:
    """Return the JSON Schema type of a value; 'integer' for 1.0."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds = {str: "string", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _key(value: Any) -> str:
    """Return the same text for values that JSON Schema treats as equal: 1 and 1.0, but not 1 and true."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
