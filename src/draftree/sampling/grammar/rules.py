"""Grammars as rules, written in the EBNF that the grammar compiler reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

from draftree.sampling.grammar.languages import Automaton, Language, Languages, Ranges, intersection, ranges_of

__all__ = [
    "Dispatch",
    "Encoding",
    "Marker",
    "Part",
    "Ref",
    "Rules",
    "as_json",
    "as_text",
    "characters",
    "literal",
    "terminal",
]


@final
@dataclass(frozen=True, slots=True)
class Ref:
    """The texts of a rule, or repetitions of them.

    Attributes:
        name: of the rule.
        least: fewest repetitions.
        most: most repetitions; None for no limit.
    """

    name: str
    least: int = 1
    most: int | None = 1

    def __str__(self) -> str:
        return self.name + _times(self.least, self.most)


LONG = 300
"""Length from which a class is written once."""
Marker = str | int
"""A text, or the id of a special token."""


@final
@dataclass(frozen=True, slots=True)
class Dispatch:
    """Any text, in which each marker is followed by a text of a rule. The only part of its rule.

    Attributes:
        name: of the rule.
        marker: the text, or the id of the special token, before it.
        is_repeated: whether any text may follow; otherwise the whole text ends there.
    """

    name: str
    marker: Marker
    is_repeated: bool
    least: int = 1

    def __str__(self) -> str:
        loops = "true" if self.is_repeated else "false"
        if isinstance(self.marker, int):
            return f"TokenTagDispatch(({self.marker}, {self.name}), loop_after_dispatch={loops})"
        return f"TagDispatch(({literal(self.marker)}, {self.name}), loop_after_dispatch={loops})"


Part = str | Ref | Dispatch
"""EBNF without references, or a reference."""
Alternative = Sequence[Part]
Encoding = Callable[[Ranges], list[str]]
"""Returns EBNF of one of some characters in a text: the alternatives."""


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
        """Set the alternatives of a rule."""
        self._rules[name] = list(alternatives)

    def add(self, *alternatives: Alternative) -> Ref:
        """Add a rule."""
        name = self.reserve()
        self.define(name, alternatives)
        return Ref(name)

    def add_language(self, languages: Languages, language: Language, encode: Encoding, *, end: str = "") -> Ref:
        """Add rules for the texts of a language.

        Args:
            languages: the factory of the language.
            language: the language.
            encode: how characters are written.
            end: EBNF that follows each text.

        Raises:
            TooLargeError: the language needs a too large automaton.
        """
        if language.is_plain:
            if language is languages.nothing:
                return self.add()
            return self.add([_expression(language, encode), *([end] if end else [])])
        return self.add_automaton(languages.automaton(language), encode, end=end)

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
        found: set[str] = set()
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
            if name in found:
                continue
            found.add(name)
            for user in users.get(name, ()):
                missing[user] -= 1
                if not missing[user]:
                    pending.append(user[0])
        return frozenset(found)

    def text(self, root: Ref) -> str | None:
        """Return the grammar as EBNF; None if it has no texts. Rules and alternatives without texts are left out."""
        productive = self.productive()
        if root.name not in productive:
            return None
        lines = [f"root ::= {root}\n"]
        seen = {root.name}
        pending = [root.name]
        for name in pending:
            bodies = []
            for parts in self._rules[name]:
                if any(not isinstance(part, str) and part.least and part.name not in productive for part in parts):
                    continue
                kept = [part for part in parts if isinstance(part, str) or part.name in productive]
                bodies.append(" ".join(map(str, kept)) or '""')
                for part in kept:
                    if not isinstance(part, str) and part.name not in seen:
                        seen.add(part.name)
                        pending.append(part.name)
            lines.append(f"{name} ::= {' | '.join(dict.fromkeys(bodies))}\n")
        return "".join(lines)


def literal(text: str) -> str:
    """Return a text as a literal of EBNF."""
    return '"' + "".join(map(_in_literal, text)) + '"'


def terminal(marker: Marker) -> str:
    """Return EBNF of a text or special token."""
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
    found = as_text(intersection(ranges, _PLAIN))
    escaped = [code for code in (*range(0x20), 0x22, 0x5C) if any(low <= code <= high for low, high in ranges)]
    short = "".join(_SHORT[code] for code in escaped if code in _SHORT)
    if short:
        found.append(f"{literal(chr(0x5C))} {characters(tuple((ord(sign),) * 2 for sign in sorted(short)))}")
    for high in range(2):
        low = [(ord(f"{code % 16:x}"),) * 2 for code in escaped if code // 16 == high and code not in _SHORT]
        if low:
            found.append(f"{literal(f'{chr(0x5C)}u00{high}')} {characters(ranges_of(low))}")
    return found


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
