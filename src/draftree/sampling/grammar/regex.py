r"""Regular expressions: ECMAScript's, with flag u, without flags i, m and s.

`.` is any character but a line terminator. `\d` and `\w` are ASCII. Anchors and look-ahead are supported outside of
repetitions. Python reads what is accepted here alike, except for `\d`, `\w`, `\s`, `\p`, `\u{…}`, `(?<name>…)` and `$`,
which it also matches before a last newline. What the two read differently otherwise is refused.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import final

from draftree.sampling.grammar.ebnf import MAX_DEPTH, MAX_OPTIONAL, MAX_PARTS, Rules, as_text, require_length
from draftree.sampling.grammar.languages import LAST, Language, Languages, Ranges, TooLargeError, complement, ranges_of

MAX_CHARACTERS = 2**15  # maximum length of a regular expression
MAX_STEPS = 10_000  # maximum alternatives before and after assertions

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACES = "\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"
_SPACE = ranges_of([(0x2000, 0x200A), *((ord(space), ord(space)) for space in _SPACES)])
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}
_LETTER = re.compile("[dDwWsSnrtfv]")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4})")
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_COUNT = re.compile(r"\{([0-9]{1,9})(,?)([0-9]{0,9})\}")
_GROUP = re.compile(r"\?(?::|(?:P?<[A-Za-z_]\w*>)|(?P<look>[=!]))")
_CONTROL = re.compile("c([A-Za-z])|0(?![0-9])")
_PROPERTY = re.compile(r"[pP]\{(\w+(?:=\w+)?)\}")


@final
@dataclass(frozen=True, slots=True)
class Regex:
    """A node of an expression."""

    kind: str  # 'chars', 'seq', 'alt', 'repeat', 'start', 'end', 'ahead' or 'not ahead'
    parts: tuple[Regex, ...] = ()
    ranges: Ranges = ()  # characters of 'chars'
    least: int = 1
    most: int | None = 1  # most repetitions; None for no limit
    has_assertions: bool = False  # whether an anchor or look-ahead is inside
    size: int = 1  # number of characters, repetitions multiplied out


def parse(text: str) -> Regex:
    require_length(text, MAX_CHARACTERS)
    return _Parser(text).parse()


def regex_grammar(text: str) -> str:
    """Return the grammar of the texts that an expression matches as a whole."""
    languages = Languages()
    rules = Rules()
    ebnf = rules.text(rules.add_language(languages, language(parse(text), languages, is_search=False), as_text))
    if ebnf is None:
        raise ValueError("no text matches it")
    return ebnf


def language(regex: Regex, languages: Languages, *, is_search: bool) -> Language:
    """Return the texts that an expression matches.

    Args:
        is_search: whether a text matches if any part of it does, as in JSON Schema; otherwise the whole text must.
    """
    translation = _Translation(languages)
    rest = languages.anything if is_search else languages.empty_text
    try:
        first = translation.run(regex, lambda _: rest, at_start=True)
        later = translation.run(regex, lambda _: rest, at_start=False) if is_search else languages.nothing
    except RecursionError as error:
        raise TooLargeError("it has too many anchors or look-aheads") from error
    if not is_search:
        return first
    if first is later:
        return languages.seq(languages.anything, later)
    return languages.alt(first, languages.seq(languages.repeat(languages.character, 1, None), later))


@final
class _Translation:
    """Translates assertions to intersections with what follows them."""

    def __init__(self, languages: Languages) -> None:
        self._languages = languages
        self._steps = 0

    def run(self, regex: Regex, rest: Callable[[bool], Language], *, at_start: bool) -> Language:
        """Return the language of an expression and of what follows it.

        Args:
            rest: returns the language of what follows, by whether the text begins there.
        """
        made = self._languages
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooLargeError("it has too many alternatives with anchors or look-ahead")
        if not regex.has_assertions:
            return self._before(self._plain(regex), rest, at_start=at_start)
        match regex.kind:
            case "start":
                return rest(True) if at_start else made.nothing
            case "end":
                return made.both(made.empty_text, rest(at_start))
            case "ahead" | "not ahead":
                ahead = self.run(regex.parts[0], lambda _: made.anything, at_start=at_start)
                return made.both(made.complement(ahead) if regex.kind == "not ahead" else ahead, rest(at_start))
            case "alt":
                return made.alt(*(self.run(part, rest, at_start=at_start) for part in regex.parts))
            case "repeat":
                if (regex.least, regex.most) != (0, 1):
                    raise ValueError("an anchor or look-ahead in a repetition is not supported: move it out of (...)")
                return made.alt(rest(at_start), self.run(regex.parts[0], rest, at_start=at_start))
        return self._sequence(regex.parts, rest, at_start=at_start)

    def _sequence(self, parts: tuple[Regex, ...], rest: Callable[[bool], Language], *, at_start: bool) -> Language:
        if not parts:
            return rest(at_start)
        count = next((place for place, part in enumerate(parts) if part.has_assertions), len(parts))
        head = Regex("seq", parts[:count]) if count else parts[0]
        others = parts[max(1, count) :]
        return self.run(head, lambda start: self._sequence(others, rest, at_start=start), at_start=at_start)

    def _before(self, head: Language, rest: Callable[[bool], Language], *, at_start: bool) -> Language:
        made = self._languages
        later = rest(False)
        if not at_start or not head.is_nullable or rest(True) is later:
            return made.seq(head, later)
        some = made.both(head, made.complement(made.empty_text))
        return made.alt(rest(True), made.seq(some, later))

    def _plain(self, regex: Regex) -> Language:
        if regex.kind == "chars":
            return self._languages.chars(regex.ranges)
        parts = [self._plain(part) for part in regex.parts]
        if regex.kind == "repeat":
            return self._languages.repeat(parts[0], regex.least, regex.most)
        return self._languages.seq(*parts) if regex.kind == "seq" else self._languages.alt(*parts)


@final
class _Parser:
    """Recursive descent. Mutated by every method."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._optional = 0
        self._repeated = 0

    def parse(self) -> Regex:
        regex = self._alternatives()
        if self._at < len(self._text):
            raise self._error("a parenthesis is closed that is not open: write \\)")
        return regex

    def _error(self, reason: str) -> ValueError:
        return ValueError(f"at character {self._at}, {reason}")

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, sign: str) -> bool:
        is_next = self._next() == sign
        self._at += is_next
        return is_next

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match

    def _alternatives(self) -> Regex:
        parts = [self._sequence()]
        while self._skip("|"):
            parts.append(self._sequence())
        if len(parts) == 1:
            return parts[0]
        self._count_optional(sum(part.kind == "seq" and not part.parts for part in parts))
        return _joined("alt", parts)

    def _count_optional(self, count: int) -> None:
        self._optional += count
        if self._optional > MAX_OPTIONAL:
            raise ValueError(
                f"it has more than {MAX_OPTIONAL} optional parts (by ? or an empty alternative): write a repetition "
                "such as {0,3}, or alternatives"
            )

    def _sequence(self) -> Regex:
        parts: list[Regex] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._quantified(self._atom()))
        return parts[0] if len(parts) == 1 else _joined("seq", parts)

    def _quantified(self, part: Regex) -> Regex:
        sign = self._next()
        least: int
        most: int | None
        if count := self._match(_COUNT):
            least = int(count[1])
            most = least if not count[2] else int(count[3]) if count[3] else None
        elif sign in ("*", "+", "?"):
            self._at += 1
            least = int(sign == "+")
            most = 1 if sign == "?" else None
        elif sign == "{":
            raise self._error("'{' begins no count such as {2,3}: write \\{")
        else:
            return part
        if most is not None and most < least:
            raise self._error("a count has a maximum below its minimum")
        self._skip("?")  # which match is preferred changes no language
        if self._next() in ("*", "+", "?"):
            raise self._error("two quantifiers in a row are not supported: keep one of them")
        self._count_optional(sign == "?")
        size = part.size * max(1, least if most is None else most)
        self._repeated += size
        if self._repeated > MAX_PARTS:
            raise ValueError(f"its repetitions make more than {MAX_PARTS} parts: lower the counts, or use * and +")
        return Regex("repeat", (part,), (), least, most, part.has_assertions, size)

    def _atom(self) -> Regex:
        sign = self._next()
        if sign in "*+?{":
            raise self._error(f"there is nothing that {sign!r} could repeat: write \\{sign}")
        self._at += 1
        match sign:
            case "(":
                return self._group()
            case "^" | "$":
                return Regex("start" if sign == "^" else "end", has_assertions=True)
            case "[":
                ranges = self._class()
            case "\\":
                ranges = self._escape(in_class=False)
            case ".":
                ranges = complement(_LINE_ENDS)
            case _:
                ranges = self._point(ord(sign))
        return Regex("chars", ranges=ranges)

    def _group(self) -> Regex:
        group = self._match(_GROUP)
        if not group and self._next() == "?":
            reason = "look-behind and flags in (?...) are not supported: write (...), (?:...), (?=...) or (?!...)"
            raise self._error(reason)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"its groups are nested deeper than {MAX_DEPTH} levels: flatten it")
        inner = self._alternatives()
        self._depth -= 1
        if not self._skip(")"):
            raise self._error("a parenthesis is not closed: write \\( for the character")
        if not group or not group["look"]:
            return inner
        return Regex("ahead" if group["look"] == "=" else "not ahead", (inner,), has_assertions=True, size=inner.size)

    def _class(self) -> Ranges:
        is_negated = self._skip("^")
        if self._next() == "]":
            raise self._error(
                "a class begins with ], which JavaScript and Python read differently: write \\] for the character, "
                "[\\s\\S] for any"
            )
        pairs: list[tuple[int, int]] = []
        while not self._skip("]"):
            low = self._class_member()
            if self._next() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
                pairs.extend(low)
                continue
            self._at += 1
            high = self._class_member()
            if not _is_single(low) or not _is_single(high) or low > high:
                raise self._error("a range in a class must have its lower end first: write \\- for the character")
            pairs.append((low[0][0], high[0][0]))
        ranges = ranges_of(pairs)
        return complement(ranges) if is_negated else ranges

    def _class_member(self) -> Ranges:
        sign = self._next()
        if not sign:
            raise self._error("a class is not closed: write \\[ for the character")
        self._at += 1
        return self._escape(in_class=True) if sign == "\\" else self._point(ord(sign))

    def _escape(self, *, in_class: bool) -> Ranges:
        if letter := self._match(_LETTER):
            if letter[0] in _CONTROLS:
                return self._point(_CONTROLS[letter[0]])
            ranges = _CLASSES[letter[0].lower()]
            return complement(ranges) if letter[0].isupper() else ranges
        if code := self._match(_CODE):
            value = int(next(filter(None, code.groups())), 16)
            if code[3] and 0xD800 <= value < 0xDC00 and (low := self._match(_LOW_HALF)):
                value = 0x10000 + ((value - 0xD800) << 10) + int(low[1], 16) - 0xDC00
            return self._point(value)
        if name := _PROPERTY.match(self._text, self._at):
            ranges = _property(name[1])
            if not ranges:
                raise self._error(f"the property {name[1]!r} is not known")
            self._at = name.end()
            return complement(ranges) if name[0][0] == "P" else ranges
        if control := self._match(_CONTROL):
            return self._point(ord(control[1]) % 32 if control[1] else 0)
        if in_class and self._skip("b"):
            return self._point(0x08)
        sign = self._next()
        if not sign or sign.isalnum():
            what = "\\" + sign if sign else "a \\ at the end"
            raise self._error(f"{what} is not supported: write the characters themselves, or a class of them")
        self._at += 1
        return self._point(ord(sign))

    def _point(self, code: int) -> Ranges:
        if code > LAST:
            raise self._error(f"there is no character {code:#x}")
        if 0xD800 <= code <= 0xDFFF:
            raise self._error(f"\\u{code:04x} is half of a surrogate pair, which is not a character")
        return ((code, code),)


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _joined(kind: str, parts: list[Regex]) -> Regex:
    has_assertions = any(part.has_assertions for part in parts)
    return Regex(kind, tuple(parts), has_assertions=has_assertions, size=sum(part.size for part in parts))


@cache
def _property(name: str) -> Ranges:
    """Return the characters of a Unicode property; none if it is not known, or the package regex is not installed."""
    if importlib.util.find_spec("regex") is None:
        return ()
    import regex

    try:
        pattern = regex.compile(rf"\p{{{name}}}+")
    except regex.error:
        return ()
    every = "".join(map(chr, range(LAST + 1)))
    return ranges_of((match.start(), match.end() - 1) for match in pattern.finditer(every))
