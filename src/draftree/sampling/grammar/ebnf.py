"""Grammars in EBNF: those of users, with limits and places of errors, and rules that are written for the compiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from draftree.sampling.grammar.languages import (
    LAST,
    Automaton,
    Language,
    Languages,
    Ranges,
    complement,
    intersection,
    ranges_of,
)


@final
@dataclass(frozen=True, slots=True)
class Ref:
    """The texts of a rule, or repetitions of them."""

    name: str
    least: int = 1
    most: int | None = 1  # most repetitions; None for no limit

    def __str__(self) -> str:
        return self.name + _times(self.least, self.most)


LONG = 300  # length from which a class is written once
Marker = str | int  # a text, or the id of a special token


@final
@dataclass(frozen=True, slots=True)
class Dispatch:
    """Any text, in which each marker is followed by a text of a rule. The only part of its rule."""

    name: str
    marker: Marker
    is_repeated: bool  # whether any text may follow; otherwise the whole text ends there
    least: int = 1

    def __str__(self) -> str:
        loops = "true" if self.is_repeated else "false"
        if isinstance(self.marker, int):
            return f"TokenTagDispatch(({self.marker}, {self.name}), loop_after_dispatch={loops})"
        return f"TagDispatch(({literal(self.marker)}, {self.name}), loop_after_dispatch={loops})"


Part = str | Ref | Dispatch  # EBNF without references, or a reference
Alternative = Sequence[Part]
Encoding = Callable[[Ranges], list[str]]  # returns EBNF of one of some characters in a text: the alternatives


@final
class Rules:
    """Rules of a grammar. Mutated by `add` and `define`."""

    def __init__(self) -> None:
        self._rules: dict[str, list[Alternative]] = {}
        self._classes: dict[tuple[Ranges, Encoding], Part] = {}

    def __len__(self) -> int:
        return len(self._rules)

    def reserve(self) -> str:
        """Return the name of a rule that is defined later; without `define` it has no texts."""
        name = f"r{len(self._rules)}"
        self._rules[name] = []
        return name

    def define(self, name: str, alternatives: Iterable[Alternative]) -> None:
        self._rules[name] = list(alternatives)

    def add(self, *alternatives: Alternative) -> Ref:
        name = self.reserve()
        self.define(name, alternatives)
        return Ref(name)

    def add_language(self, languages: Languages, language: Language, encode: Encoding) -> Ref:
        if not language.is_plain:
            return self.add_automaton(languages.automaton(language), encode)
        return self.add() if language is languages.nothing else self.add([_expression(language, encode)])

    def add_automaton(self, automaton: Automaton, encode: Encoding, *, end: str = "") -> Ref:
        """Add rules for the texts of an automaton, each followed by `end`."""
        names = [self.reserve() for _ in automaton.steps]
        for name, steps, is_end in zip(names, automaton.steps, automaton.ends, strict=True):
            parts: list[Alternative] = [[self._class(ranges, encode), Ref(names[at])] for at, ranges in steps.items()]
            self.define(name, [*parts, [end or '""']] if is_end else parts)
        return Ref(names[0]) if names else self.add()

    def _class(self, ranges: Ranges, encode: Encoding) -> Part:
        """Return EBNF of one of some characters; a long one is a rule of its own."""
        key = ranges, encode
        if key not in self._classes:
            text = _group(encode(ranges))
            self._classes[key] = text if len(text) <= LONG else self.add([text])
        return self._classes[key]

    def productive(self) -> frozenset[str]:
        """Return the rules that have a text."""
        users: dict[str, list[tuple[str, int]]] = {}
        missing: dict[tuple[str, int], int] = {}
        productive: set[str] = set()
        pending: list[str] = []
        for name, alternatives in self._rules.items():
            for number, parts in enumerate(alternatives):
                needed = {part.name for part in parts if not isinstance(part, str) and part.least}
                missing[name, number] = len(needed)
                for need in needed:
                    users.setdefault(need, []).append((name, number))
                if not needed:
                    pending.append(name)
        while pending:
            name = pending.pop()
            if name not in productive:
                productive.add(name)
                for user in users.get(name, ()):
                    missing[user] -= 1
                    if not missing[user]:
                        pending.append(user[0])
        return frozenset(productive)

    def text(self, root: Ref) -> str | None:
        """Return the grammar as EBNF; None if it has no texts. Rules and alternatives without texts are left out."""
        productive = self.productive()
        if root.name not in productive:
            return None
        lines = {root.name: ""}
        pending = [root.name]
        for name in pending:
            bodies = []
            for parts in self._rules[name]:
                empty = [part for part in parts if not isinstance(part, str) and part.name not in productive]
                if any(part.least for part in empty):
                    continue
                kept = [part for part in parts if part not in empty]
                bodies.append(" ".join(map(str, kept)) or '""')
                fresh = {part.name: "" for part in kept if not isinstance(part, str) and part.name not in lines}
                pending += fresh
                lines |= fresh
            lines[name] = f"{name} ::= {' | '.join(dict.fromkeys(bodies))}\n"
        return "".join([f"root ::= {root}\n", *lines.values()])


def literal(text: str) -> str:
    return '"' + "".join(map(_in_literal, text)) + '"'


def terminal(marker: Marker) -> str:
    return f"Token({marker})" if isinstance(marker, int) else literal(marker)


def characters(ranges: Ranges) -> str:
    """Return a class of EBNF."""
    return "[" + "".join(_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in ranges) + "]"


def as_text(ranges: Ranges) -> list[str]:
    """Write characters as they are."""
    return [characters(ranges)] if ranges else []


_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))
_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}


def as_json(ranges: Ranges) -> list[str]:
    """Write characters as in a JSON string, those that must be escaped by one escape each."""
    classes = as_text(intersection(ranges, _PLAIN))
    escaped = [code for code in (*range(0x20), 0x22, 0x5C) if any(low <= code <= high for low, high in ranges)]
    short = sorted(_SHORT[code] for code in escaped if code in _SHORT)
    if short:
        classes.append(f"{literal(chr(0x5C))} {characters(tuple((ord(sign),) * 2 for sign in short))}")
    for high in range(2):
        low = [(ord(f"{code % 16:x}"),) * 2 for code in escaped if code // 16 == high and code not in _SHORT]
        if low:
            classes.append(f"{literal(f'{chr(0x5C)}u00{high}')} {characters(ranges_of(low))}")
    return classes


def _group(alternatives: Sequence[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def _expression(language: Language, encode: Encoding) -> str:
    """Return EBNF of a language without intersections."""
    if language.kind == "chars":
        return _group(encode(language.args))
    if language.kind == "alt":
        return f"({' | '.join(_expression(part, encode) for part in language.args)})"
    if language.kind == "repeat":
        part, least, most = language.args
        return f"({_expression(part, encode)}){_times(least, most)}"
    parts: list[str] = []
    while language.kind == "seq" and language.args:
        parts.append(_expression(language.args[0], encode))
        language = language.args[1]
    if language.kind != "seq":
        parts.append(_expression(language, encode))
    return " ".join(parts) or '""'


def _times(least: int, most: int | None) -> str:
    signs = {(1, 1): "", (0, 1): "?", (0, None): "*", (1, None): "+"}
    return signs.get((least, most), f"{{{least},{'' if most is None else most}}}")


def _code(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _in_literal(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character >= " " and character != "\x7f" else f"\\u{ord(character):04x}"


MAX_CHARACTERS = 2**18  # maximum length of a grammar
MAX_DEPTH = 128  # maximum nesting of brackets
MAX_OPTIONAL = 48  # optional parts of one rule; compile time is quadratic in them
MAX_PARTS = 4096  # repeated parts, each counted with its maximum number of repetitions; * and + count once

_CLASS = re.compile(r"\[(\^?)((?:\\.|[^\]\\\n])*)\]", flags=re.DOTALL)
_LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*', flags=re.DOTALL)
_PARTS = re.compile(rf'("(?:[^"\\\n]|\\.)*"|#[^\n]*)|{_CLASS.pattern}', flags=re.DOTALL)
_SYMBOL = re.compile(r"\{(\d*)(,?)(\d*)\}|[\w-]+|\S")
_OPTIONAL = re.compile(r"\?|[(|]\s*(?=[)|])")
_CODE_POINT = re.compile(r"\\(?:\\|x([0-9a-fA-F]+)|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", flags=re.DOTALL)
"""Escapes as xgrammar reads them: all digits after an x are one number."""
_MEMBER = re.compile(rf"{_CODE_POINT.pattern}|.", flags=re.DOTALL)
_CONTROLS = {"n": 0x0A, "t": 0x09, "r": 0x0D, "v": 0x0B, "f": 0x0C, "a": 0x07, "b": 0x08, "e": 0x1B, "0": 0}


def require_bounded_grammar(text: str) -> None:
    """Raise ValueError for EBNF that is too long, too deep, or has a character outside literals that no rule can."""
    require_length(text, MAX_CHARACTERS)
    _require_unicode(text)
    bare = _LITERALS.sub(lambda match: (" " if match[0][0] == "#" else ".") * len(match[0]), text)
    if match := re.search(r"[^\x00-\x7f]", bare):
        line = text.count("\n", 0, match.start()) + 1
        column = match.start() - text.rfind("\n", 0, match.start())
        raise ValueError(
            f"{match[0]!r} at line {line}, column {column} is outside a literal, where only ASCII is allowed: "
            'delete it, or write it in "..."'
        )
    if max(accumulate((sign in "([{") - (sign in ")]}") for sign in bare), default=0) > MAX_DEPTH:
        raise ValueError(f"its brackets are nested deeper than {MAX_DEPTH} levels: flatten it")
    count = max(len(_OPTIONAL.findall(rule)) for rule in bare.split("::="))
    if count > MAX_OPTIONAL:
        raise ValueError(
            f"it has {count} optional parts (by ? or an empty alternative) in one rule, and at most {MAX_OPTIONAL} "
            "are compiled: write a repetition such as {0,3}, or alternatives"
        )
    _require_few_parts(bare)


def require_length(text: str, most: int) -> None:
    if len(text) > most:
        raise ValueError(f"it has {len(text)} characters, and at most {most} are compiled: shorten it")


def with_valid_classes(text: str) -> str:
    """Return EBNF whose classes have no half surrogate pairs, which are no characters; others stay as they are."""

    def replaced(match: re.Match[str]) -> str:
        ranges = None if match[1] is not None else _ranges(match[3])
        if ranges is None or not (match[2] or any(low < 0xD800 and high > 0xDFFF for low, high in ranges)):
            return match[0]
        valid = ranges_of(ranges)
        return characters(complement(valid) if match[2] else valid)

    return _PARTS.sub(replaced, text)


def _ranges(body: str) -> Ranges | None:
    """Return the characters of a class; None if it has an escape that is not known."""
    codes: list[tuple[int, bool]] = []
    for member in _MEMBER.finditer(body):
        sign = member[0]
        digits = next(filter(None, member.groups()), None)
        if len(sign) == 1:
            codes.append((ord(sign), sign == "-"))
        elif digits is not None:
            codes.append((int(digits, 16), False))
        elif sign[1] in _CONTROLS or not sign[1].isalnum():
            codes.append((_CONTROLS.get(sign[1], ord(sign[1])), False))
        else:
            return None
    pairs: list[tuple[int, int]] = []
    place = 0
    while place < len(codes):
        is_range = place + 2 < len(codes) and codes[place + 1][1]
        pairs.append((codes[place][0], codes[place + 2 * is_range][0]))
        place += 1 + 2 * is_range
    return tuple(pairs) if all(low <= high <= LAST for low, high in pairs) else None


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair, which is not a character") from error
    for match in _CODE_POINT.finditer(text):
        digits = next(filter(None, match.groups()), "").lstrip("0")
        if len(digits) == 4 and 0xD800 <= int(digits, 16) <= 0xDFFF:
            raise ValueError(
                f"{match[0]} is half of a surrogate pair, which is not a character: write the intended character"
            )
    if "\0" in text:
        raise ValueError(f"character {text.index(chr(0))} is a null character, which is not allowed: leave it out")


def _require_few_parts(bare: str) -> None:
    """Bound the expanded size of repetitions."""
    sizes = [0]
    last = 0
    parts = 0
    for symbol in _SYMBOL.finditer(re.sub(r"\.+", ".", bare)):
        if symbol[0] == "(":
            sizes.append(0)
        elif symbol[0] == ")":
            last = max(1, sizes.pop()) if len(sizes) > 1 else 1
            sizes[-1] += last
        elif symbol[0] in "?*+" or symbol[2] is not None:
            times = max(1, *(int(count[:9]) for count in (symbol[1], symbol[3]) if count), 1)
            parts += last * times
            sizes[-1] += last * (times - 1)
            last *= times
        elif symbol[0] != "|":
            last = 1
            sizes[-1] += 1
        if parts > MAX_PARTS:
            raise ValueError(f"its repetitions make more than {MAX_PARTS} parts: lower the counts, or use * and +")
