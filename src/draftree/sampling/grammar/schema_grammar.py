"""JSON schemas as grammars, and the list of what a grammar cannot enforce.

A text is JSON on one line. Every text of a grammar follows the schema, but for the listed parts; some forms are left
out: the properties of an object have the order of the schema, and a schema that has keywords of one type and no `type`
is of that type. A conjunction of schemas (`allOf`, `$ref` beside other keywords) is compiled as one schema, whose
strings and numbers are intersections of regular languages.
"""

from __future__ import annotations

import difflib
import enum
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple, final

from draftree.sampling.grammar.ebnf import Alternative, Encoding, Part, Ref, Rules, as_json, as_text, literal
from draftree.sampling.grammar.languages import FORMATS, Automaton, Bound, Language, Languages, TooLargeError, numbers
from draftree.sampling.grammar.regex import language, parse
from draftree.sampling.grammar.schema import References, SchemaError, validator_of

MAX_RULES = 20_000  # maximum rules of one grammar
MAX_WIDE = 512
"""Maximum states, in one grammar, after which most characters may follow: compiling one takes some 8 ms for 49,000
tokens (one core of an AMD EPYC), so this many take 4 s. States of this kind come from bounds of a string's length."""
WIDE = 256  # a state is wide if more characters than this lead to other states
MAX_COUNTED = 2048  # maximum properties of an object times its 'minProperties' or 'maxProperties'
MAX_PATTERNS = 4  # maximum patterns of names in one object: each set of them has rules of its own
MAX_PAIRS = 400  # maximum pairs of schemas that are compared for one 'oneOf'

STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
ARRAYS = frozenset({"items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"})
OBJECTS = frozenset({"properties", "required", "additionalProperties", "unevaluatedProperties"}).union(
    {"patternProperties", "propertyNames", "minProperties", "maxProperties"}
)
UNENFORCED = {
    "array": ("contains", "minContains", "maxContains", "uniqueItems"),
    "object": ("dependencies", "dependentRequired", "dependentSchemas"),
    "": ("$dynamicRef", "$recursiveRef", "if", "not"),
}
"""Keywords by the type that they are about; empty for all types."""
ANNOTATIONS = frozenset({"$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "$vocabulary"}).union(
    {"contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description"},
    {"else", "examples", "readOnly", "then", "title", "writeOnly"},
)
COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf", "const", "enum", "type"})
ASSERTIONS = COMBINING.union(STRINGS, NUMBERS, ARRAYS, OBJECTS, *UNENFORCED.values())
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
TYPES_OF = {"string": STRINGS, "number": NUMBERS, "array": ARRAYS, "object": OBJECTS}


@final
@dataclass(frozen=True, slots=True)
class SchemaGrammar:
    ebnf: str  # with the rule 'root'
    unenforced: tuple[str, ...]  # what narrows the texts and is not in the grammar, each with its place


@lru_cache(64)
def schema_grammar(text: str) -> SchemaGrammar:
    rules = Rules()
    compiler = SchemaCompiler(rules)
    ebnf = rules.text(compiler.add(text))
    if ebnf is None:
        raise SchemaError("#", "no text follows the schema")
    return SchemaGrammar(ebnf, compiler.unenforced())


class Form(enum.Enum):
    """How a value is written."""

    JSON = enum.auto()
    BARE = enum.auto()  # a string is written without quotation marks and escapes, and has no "</"
    ARGUMENTS = enum.auto()
    """An object is written as XML-like parameters, with bare strings. Other values are not written."""


class _Item(NamedTuple):
    """A schema of a conjunction, without some of its keywords."""

    schema: Any
    dropped: frozenset[str] = frozenset()

    @property
    def words(self) -> set[str]:
        return (set(self.schema) & ASSERTIONS) - self.dropped


def _having(items: Iterable[_Item], word: str) -> list[_Item]:
    return [item for item in items if word in item.words]


class _Choice(NamedTuple):
    """A conjunction with 'anyOf' or 'oneOf': one of the branches holds beside the other schemas."""

    others: list[_Item]
    branches: list[_Item]
    path: str
    is_one: bool


class _Condition(NamedTuple):
    """A condition on strings, and the schema that has it."""

    item: _Item
    word: str
    language: Language


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
        self._choices: list[_Choice] = []
        self._added: dict[tuple[Language, Encoding, str], Ref | None] = {}
        self._reports: dict[str, None] = {}
        self._is_silent = False
        self._wide = 0

    def unenforced(self) -> tuple[str, ...]:
        """Return what narrows the texts and is not in the grammar, for all schemas so far."""
        return tuple(self._reports)

    def add(self, text: str, form: Form = Form.JSON) -> Ref:
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
        for others, branches, path, _ in self._choices:
            if len(branches) * (len(branches) - 1) > 2 * MAX_PAIRS:
                pairs.append((self._any, f"'oneOf' at {path}: it has too many schemas to compare"))
                continue
            for second in range(len(branches)):
                for first in range(second):
                    both = self._value([*others, branches[first], branches[second]], Form.JSON)
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

    def _error(self, item: _Item, reason: str) -> SchemaError:
        return SchemaError(self._references.path_of(item.schema), reason)

    # conjunctions

    def _flattened(self, items: Iterable[_Item]) -> list[_Item] | None:
        """Return the schemas of a conjunction, along references and 'allOf'; None if it has `false`."""
        flat: dict[tuple[int, frozenset[str]], _Item] = {}
        pending = list(items)
        for item in pending:
            schema, dropped = item
            if schema is False:
                return None
            if schema is True or (id(schema), dropped) in flat:
                continue
            if not isinstance(schema, dict):
                raise SchemaError("#", f"{_shown(schema)} is not a schema: it must be an object, true or false")
            flat[id(schema), dropped] = item
            self._report_typos(item)
            if "$ref" in schema and "$ref" not in dropped:
                self._references.follow(schema)
                pending.append(_Item(self._references.target(schema)))
            if "allOf" in schema and "allOf" not in dropped:
                pending.extend(map(_Item, self._get(item, "allOf", list)))
        return [item for item in flat.values() if item.words - {"$ref", "allOf"}]

    def _choice(self, items: list[_Item]) -> _Choice | None:
        for place, item in enumerate(items):
            for word in ("anyOf", "oneOf"):
                if word in item.words:
                    others = [*items[:place], _Item(item.schema, item.dropped | {word}), *items[place + 1 :]]
                    branches = list(map(_Item, self._get(item, word, list)))
                    return _Choice(others, branches, self._references.path_of(item.schema), word == "oneOf")
        return None

    def _get(self, item: _Item, word: str, *kinds: type) -> Any:
        value = item.schema[word]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
            wanted = " or ".join(dict.fromkeys(names.get(kind, "a number") for kind in kinds))
            raise self._error(item, f"'{word}' is {_shown(value)}: it must be {wanted}")
        return value

    def _count(self, item: _Item, word: str) -> int:
        value = self._get(item, word, int, float)
        if value < 0 or value != int(value):
            raise self._error(item, f"'{word}' is {value}: it must be a whole number of at least 0")
        return int(value)

    def _counts(self, items: list[_Item], word: str) -> list[int]:
        return [self._count(item, word) for item in _having(items, word)]

    def _value(self, items: Iterable[_Item], form: Form) -> Ref:
        """Return the rule of the values that fit all schemas."""
        flat = self._flattened(items)
        if flat is None:
            return self._nothing
        if not flat and form is Form.JSON:
            return self._any
        key = (form, frozenset((id(item.schema), item.dropped) for item in flat))
        if key not in self._known:
            name = self._rules.reserve()
            self._known[key] = Ref(name)
            self._pending.append((name, flat, form))
        return self._known[key]

    def _alternatives(self, items: list[_Item], form: Form) -> list[Alternative]:
        if choice := self._choice(items):
            if choice.is_one and len(choice.branches) > 1 and not self._is_silent:
                self._choices.append(choice)
            return [[self._value([*choice.others, branch], form)] for branch in choice.branches]
        values = self._values(items)
        types = self._types(items)
        if values is not None:
            fitting = types | ({"integer"} if "number" in types else set())
            # OpenAPI 3.0 writes null so; elsewhere `nullable` is an annotation
            fitting |= {"null"} if any(item.schema.get("nullable") is True for item in items) else set()
            return self._constants([value for value in values if type_of(value) in fitting], items, form)
        self._report_unenforced(items, types)
        return [[self._of_type(kind, items, form)] for kind in TYPES if kind in types]

    def _of_type(self, kind: str, items: list[_Item], form: Form) -> Part:
        if kind == "object":
            return self._object(items, is_xml=form is Form.ARGUMENTS)
        if form is Form.ARGUMENTS:
            return self._nothing
        match kind:
            case "string":
                return self._string(items, is_bare=form is Form.BARE)
            case "array":
                return self._array(items)
            case "null":
                return '"null"'
            case "boolean":
                return '("true" | "false")'
        return self._number(items, is_integer=kind == "integer")

    def _types(self, items: list[_Item]) -> set[str]:
        """Return the types of the values; 'number' stands for all numbers, 'integer' for those alone."""
        types = set(TYPES)
        typed = _having(items, "type")
        for item in typed:
            value = self._get(item, "type", str, list)
            names = value if isinstance(value, list) else [value]
            for name in names:
                if name not in TYPES:
                    raise self._error(item, f"'type' is {_shown(name)}: it must be one of {', '.join(TYPES)}")
            types &= {*names, *(["integer"] if "number" in names else [])}
        words = set[str]().union(*(item.words for item in items))
        implied = {kind for kind, keywords in TYPES_OF.items() if keywords & words}
        if not typed and implied and not words & {"enum", "const"}:
            types = implied | ({"integer"} if "number" in implied else set())
        for item in _having(items, "not"):
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
        keywords = [word for kind, words in UNENFORCED.items() if not kind or kind in types for word in words]
        for item in items:
            for word in keywords:
                if word not in item.words or word in ("minContains", "maxContains"):
                    continue
                if word == "not" and self._excluded(item) is not None:
                    continue
                if word == "uniqueItems":
                    most = min(self._counts(items, "maxItems"), default=None)
                    if item.schema[word] is False or most in (0, 1):
                        continue
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
        lists = [[item.schema["const"]] for item in _having(items, "const")]
        for item in _having(items, "enum"):
            lists.append(self._get(item, "enum", list))
            if not lists[-1]:
                raise self._error(item, "'enum' is empty: give at least one value")
        if not lists:
            return None
        common = {_key(value): value for value in lists[0]}
        for values in lists[1:]:
            keys = set(map(_key, values))
            common = {key: value for key, value in common.items() if key in keys}
        return list(common.values())

    def _constants(self, values: list[Any], items: list[_Item], form: Form) -> list[Alternative]:
        others = [item for item in items if item.words - {"enum", "const", "type"}]
        values = [value for value in values if all(self._fits(item, value) for item in others)]
        if form is Form.ARGUMENTS:
            raise SchemaError("#", "arguments that are constants are not supported in this format of calls")
        if form is Form.JSON:
            return [[literal(_json(value))] for value in values]
        texts = (value if isinstance(value, str) else _json(value) for value in values)
        return [[literal(text)] for text in texts if "</" not in text]

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
        encode, end = (as_text, "") if is_bare else (as_json, '"\\""')
        conditions = self._conditions(items)
        attempts = _attempts(conditions)
        reason = ""
        while kept := next(attempts):
            text = made.both(*(condition.language for condition in kept), *([self._untagged] if is_bare else []))
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
                item = condition.item
                word = condition.word
                self._report(item, f"'{word}' {_shown(item.schema[word])}", reason)
        if not kept:
            return self._free_bare_string if is_bare else self._free_string
        body = body or self._nothing
        return body if is_bare else self._rules.add(['"\\""', body])

    @cached_property
    def _untagged(self) -> Language:
        """The texts without "</"."""
        made = self._languages
        return made.complement(made.seq(made.anything, made.text("</"), made.anything))

    @cached_property
    def _free_bare_string(self) -> Ref:
        return self._rules.add_language(self._languages, self._untagged, as_text)

    @cached_property
    def _free_string(self) -> Ref:
        """The rule of all JSON strings, escapes of whole surrogate pairs included."""
        hexadecimal = "[0-9A-Fa-f]"
        rest = self._rules.reserve()
        code = self._rules.add(
            ["[0-9A-CE-Fa-ce-f]", hexadecimal, hexadecimal, hexadecimal],
            ["[Dd] [0-7]", hexadecimal, hexadecimal],
            ["[Dd] [89ABab]", hexadecimal, hexadecimal, '"\\\\u" [Dd] [C-Fc-f]', hexadecimal, hexadecimal],
        )
        escape = self._rules.add(['[\\"\\\\/bfnrt]'], ['"u"', code])
        plain = as_json(((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)))
        self._rules.define(rest, [['"\\""'], [*plain, Ref(rest)], ['"\\\\"', escape, Ref(rest)]])
        return self._rules.add(['"\\""', Ref(rest)])

    def _conditions(self, items: list[_Item]) -> list[_Condition]:
        """Return what narrows the strings; from the end on, they are left out if their automaton is too large."""
        made = self._languages
        conditions = []
        for item in _having(items, "pattern"):
            text = self._pattern(item, "pattern", self._get(item, "pattern", str))
            if text is not None:
                conditions.append(_Condition(item, "pattern", text))
        for item in _having(items, "format"):
            name = item.schema["format"]
            if isinstance(name, str) and name in FORMATS:
                conditions.append(_Condition(item, "format", language(parse(FORMATS[name]), made, is_search=False)))
        for item in items:
            for word in ("minLength", "maxLength"):
                if word in item.words:
                    count = self._count(item, word)
                    bounds = (count, None) if word == "minLength" else (0, count)
                    conditions.append(_Condition(item, word, made.repeat(made.character, *bounds)))
        return [condition for condition in conditions if condition.language is not made.anything]

    def _pattern(self, item: _Item, word: str, pattern: str) -> Language | None:
        """Return the strings that a pattern fits; None, with a report, if it is not supported."""
        try:
            return language(parse(pattern), self._languages, is_search=True)
        except ValueError as error:
            self._report(item, f"'{word}' {_shown(pattern)}", str(error))
            return None

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
        multiples = []
        for item in _having(items, "multipleOf"):
            multiples.append(_decimal(self._get(item, "multipleOf", int, float)))
            if multiples[-1] <= 0:
                raise self._error(item, "'multipleOf' must be above 0")
        free = self._free_integer if is_integer else self._free_number
        if least is most is None and not multiples:
            return free
        for steps in (multiples, []):
            try:
                text = numbers(self._languages, least, most, steps, is_integer=is_integer)
                return self._add_language(text, as_text) or self._nothing
            except TooLargeError as error:
                for item in items:
                    for word in ["multipleOf"] if steps else sorted(NUMBERS - {"multipleOf"}):
                        if word in item.words:
                            self._report(item, f"'{word}'", str(error))
        return free

    @cached_property
    def _free_integer(self) -> Ref:
        return self._rules.add(['"-"? ("0" | [1-9] [0-9]*)'])

    @cached_property
    def _free_number(self) -> Ref:
        return self._rules.add(['"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\\-]? [0-9]+)?'])

    def _bound(self, items: list[_Item], word: str, strict_word: str) -> Bound | None:
        """Return the narrowest bound. In drafts up to 4, the strict keyword is true or false."""
        bounds = []
        for item in items:
            words = item.words
            strict = self._get(item, strict_word, int, float, bool) if strict_word in words else False
            if word in words:
                bounds.append(Bound(_decimal(self._get(item, word, int, float)), is_strict=strict is True))
            if not isinstance(strict, bool):
                bounds.append(Bound(_decimal(strict), is_strict=True))
        sign = -1 if word == "maximum" else 1
        return max(bounds, key=lambda bound: (sign * bound.value, bound.is_strict), default=None)

    # arrays

    def _array(self, items: list[_Item]) -> Ref:
        tuples = [self._tuple(item) for item in items]
        size = max((len(parts) for parts, _ in tuples), default=0)
        least = max(self._counts(items, "minItems"), default=0)
        most = min(self._counts(items, "maxItems"), default=None)
        if size and all(rest is None for _, rest in tuples):
            most = size if most is None else min(size, most)
        # a tuple is written with all of its elements
        least = max(least, size if most is None else min(size, most))
        if most is not None and least > most:
            return self._nothing
        elements = [
            self._value([_Item(_element(parts, rest, place)) for parts, rest in tuples], Form.JSON)
            for place in range(min(size, least))
        ]
        rest = self._value([_Item(True if rest is None else rest) for _, rest in tuples], Form.JSON)
        empty: list[Alternative] = []
        if not elements and most != 0:
            elements = [rest]
            empty = [['"[]"']] if least == 0 else []
        count = len(elements)
        listed = [part for element in elements for part in ('", "', element)][1:]
        more: list[Part] = []
        if most is None or most > count:
            name = self._rules.add(['", "', rest]).name
            more = [Ref(name, max(0, least - count), None if most is None else most - count)]
        return self._rules.add(*empty, ['"["', *listed, *more, '"]"'])

    def _tuple(self, item: _Item) -> tuple[list[Any], Any]:
        """Return the schemas of the first elements, and that of the others; None if it is not given."""
        words = item.words
        parts = self._get(item, "prefixItems", list) if "prefixItems" in words else []
        rest = item.schema["items"] if "items" in words else None
        if isinstance(rest, list):
            parts, rest = rest, item.schema.get("additionalItems")
        if rest is None and "unevaluatedItems" in words:
            rest = item.schema["unevaluatedItems"]
        return parts, rest

    # objects

    def _object(self, items: list[_Item], *, is_xml: bool) -> Ref:
        members = _Members(self, items)
        names = dict.fromkeys([*members.named(), *members.required])
        entries: list[_Entry] = []
        for name in names:
            value = self._value(members.schemas_of(name), Form.BARE if is_xml else Form.JSON)
            is_required = name in members.required
            if not is_xml:
                entries.append(_Entry([literal(f"{_json(name)}: "), value], is_required))
            elif name and not set("<>=\n") & set(name):
                parts: list[Part] = [literal(f"<parameter={name}>\n"), value, literal("\n</parameter>\n")]
                entries.append(_Entry(parts, is_required))
            elif is_required:
                raise SchemaError("#", f"the format of calls has no place for the name {_shown(name)}")
        pairs = [] if is_xml else list(members.free(names))
        pair = self._rules.add(*pairs) if pairs else None
        least, most = self._bounds_of_members(items, entries, pair)
        body = self._body(entries, pair, [] if is_xml else ['", "'], least=least, most=most)
        return self._rules.add(body if is_xml else ['"{"', *body, '"}"'])

    def _bounds_of_members(self, items: list[_Item], entries: list[_Entry], pair: Ref | None) -> tuple[int, int | None]:
        required = sum(entry.is_required for entry in entries)
        least = max(self._counts(items, "minProperties"), default=0)
        most = min(self._counts(items, "maxProperties"), default=None)
        if least <= required:
            least = 0
        if most is not None and pair is None and most >= len(entries):
            most = None
        if max(least, most or 0) * len(entries) > MAX_COUNTED:
            for word in ("minProperties", "maxProperties"):
                for item in _having(items, word):
                    self._report(item, f"'{word}'", f"{len(entries)} properties are too many to count")
            return 0, None
        if pair is not None and least > max(1, required + 1):
            for item in _having(items, "minProperties"):
                self._report(item, "'minProperties'", "free names may occur twice")
        return least, most

    def _body(
        self, entries: list[_Entry], pair: Ref | None, between: list[Part], *, least: int, most: int | None
    ) -> list[Part]:
        """Return the members of an object: listed ones in order, then free ones; counted if there are bounds."""
        rules = self._rules
        nothing = [self._nothing]
        limit = least if most is None else most + 1  # a higher count makes no difference

        def end(count: int, *, is_first: bool) -> Sequence[Part]:
            missing = max(0, least - count)
            room = None if most is None else most - count
            if pair is None or room == 0:
                return nothing if missing else []
            more = rules.add([*between, pair]).name
            if not is_first:
                return [Ref(more, missing, room)]
            some = [pair, Ref(more, max(0, missing - 1), None if room is None else room - 1)]
            return some if missing else [rules.add([], some)]

        @cache
        def rest(place: int, count: int) -> Sequence[Part]:
            """Return the parts from an entry on, after at least one member; `count` members are written."""
            if place == len(entries):
                return end(count, is_first=False)
            entry = entries[place]
            following = min(count + 1, limit)
            is_full = most is not None and following > most
            written = nothing if is_full else [*between, *entry.parts, *rest(place + 1, following)]
            return written if entry.is_required else [rules.add(written, rest(place + 1, count))]

        for place in reversed(range(len(entries) + 1)):  # from the end, so that the recursion is shallow
            for count in range(min(place, limit) + 1):
                rest(place, count)
        parts = end(0, is_first=True)
        for place, entry in reversed(list(enumerate(entries))):
            after = nothing if most == 0 else [*entry.parts, *rest(place + 1, min(1, limit))]
            parts = after if entry.is_required else [rules.add(after, parts)]
        return list(parts)

    def _names(self, items: Iterable[_Item]) -> Language:
        """Return the strings that fit all schemas."""
        made = self._languages
        flat = self._flattened(items)
        if flat is None:
            return made.nothing
        if choice := self._choice(flat):
            return made.alt(*(self._names([*choice.others, branch]) for branch in choice.branches))
        if "string" not in self._types([*flat, _Item({"type": "string"})]):
            return made.nothing
        self._report_unenforced(flat, {"string"})
        values = self._values(flat)
        parts = [condition.language for condition in self._conditions(flat)]
        if values is not None:
            parts.append(made.alt(*(made.text(value) for value in values if isinstance(value, str))))
        return made.both(*parts)

    @cached_property
    def _nothing(self) -> Ref:
        """The rule without texts."""
        return self._rules.add()

    @cached_property
    def _any(self) -> Ref:
        """The rule of all JSON values."""
        value = Ref(self._rules.reserve())
        element = self._rules.add(['", "', value]).name
        member = self._rules.add([self._free_string, '": "', value])
        pair = self._rules.add(['", "', member]).name
        filled: list[Part] = ['"{"', member, Ref(pair, 0, None), '"}"']
        listed: list[Part] = ['"["', value, Ref(element, 0, None), '"]"']
        scalars: list[Part] = [self._free_string, self._free_number, '"true"', '"false"', '"null"']
        self._rules.define(value.name, [['"{}"'], filled, ['"[]"'], listed, *([scalar] for scalar in scalars)])
        return value


class _Entry(NamedTuple):
    """A listed property of an object."""

    parts: Sequence[Part]
    is_required: bool


@final
class _Members:
    """The properties of an object that fits all schemas of a conjunction."""

    def __init__(self, compiler: SchemaCompiler, items: list[_Item]) -> None:
        self._compiler = compiler
        self._items = items
        self.required = {
            str(name): None for item in _having(items, "required") for name in compiler._get(item, "required", list)
        }
        self._named = [compiler._get(item, "properties", dict) if "properties" in item.words else {} for item in items]
        self._patterns: list[list[tuple[Language, Any]]] = []
        for item in items:
            has_patterns = "patternProperties" in item.words
            patterns = compiler._get(item, "patternProperties", dict) if has_patterns else {}
            texts = [compiler._pattern(item, "patternProperties", pattern) for pattern in patterns]
            pairs = zip(texts, patterns.values(), strict=True)
            self._patterns.append([(text, schema) for text, schema in pairs if text is not None])
        names = [_Item(item.schema["propertyNames"]) for item in _having(items, "propertyNames")]
        self._names = compiler._names(names) if names else compiler._languages.anything
        words = set[str]().union(*(item.words for item in items))
        self._has_others = "additionalProperties" in words
        # a schema that lists properties and does not mention others means no others
        is_closed = words & {"properties", "patternProperties"} and "unevaluatedProperties" not in words
        self._is_open = self._has_others or not is_closed

    def named(self) -> Iterator[str]:
        for named in self._named:
            yield from named

    def schemas_of(self, name: str) -> list[_Item]:
        made = self._compiler._languages
        if not made.matches(self._names, name):
            return [_Item(False)]
        schemas: list[Any] = []
        is_evaluated = False
        for item, named, patterns in zip(self._items, self._named, self._patterns, strict=True):
            evaluating = [named[name]] if name in named else []
            evaluating += [schema for pattern, schema in patterns if made.matches(pattern, name)]
            is_evaluated |= bool(evaluating)
            schemas += evaluating or _others(item)
        return [_Item(schema) for schema in (schemas if is_evaluated else [*schemas, *self._unevaluated()])]

    def _unevaluated(self) -> list[Any]:
        word = "unevaluatedProperties"
        return [] if self._has_others else [item.schema[word] for item in _having(self._items, word)]

    def free(self, listed: Iterable[str]) -> Iterator[Alternative]:
        """Yield alternatives of a member whose name is not listed, by the patterns that its name matches."""
        compiler = self._compiler
        made = compiler._languages
        patterns = list(dict.fromkeys(pattern for pairs in self._patterns for pattern, _ in pairs))
        if len(patterns) > MAX_PATTERNS:
            for item in _having(self._items, "patternProperties"):
                compiler._report(item, "'patternProperties'", f"{len(patterns)} patterns are too many to combine")
            patterns = patterns[:MAX_PATTERNS]
        unlisted = made.complement(made.alt(*map(made.text, listed)))
        for number in range(2 ** len(patterns)):
            chosen = {pattern for place, pattern in enumerate(patterns) if number >> place & 1}
            if not chosen and not self._is_open:
                continue
            schemas: list[Any] = [] if chosen else self._unevaluated()
            for item, pairs in zip(self._items, self._patterns, strict=True):
                schemas += [schema for pattern, schema in pairs if pattern in chosen] or _others(item)
            if any(schema is False for schema in schemas):
                continue
            others = (made.complement(pattern) for pattern in patterns if pattern not in chosen)
            name = made.both(self._names, unlisted, *chosen, *others)
            if name is made.nothing:
                continue
            value = compiler._value(map(_Item, schemas), Form.JSON)
            key = self._key(name)
            if key is not None:
                yield [key, '": "', value]

    def _key(self, name: Language) -> Ref | None:
        compiler = self._compiler
        for text in (name, self._names):
            if text is compiler._languages.anything:
                break
            try:
                body = compiler._add_language(text, as_json, '"\\""')
            except TooLargeError as error:
                compiler._report(self._items[0], "free names of properties", str(error))
            else:
                return None if body is None else compiler._rules.add(['"\\""', body])
        return compiler._free_string


def _others(item: _Item) -> list[Any]:
    return [item.schema["additionalProperties"]] if "additionalProperties" in item.words else []


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
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
