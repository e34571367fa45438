"""Grammars of users in EBNF: limits, places of errors, and classes that hold valid Unicode only.

Source: the format is that of llama.cpp's GBNF, as xgrammar reads it.
"""

from __future__ import annotations

import re

from draftree.sampling.grammar.languages import Ranges, complement, ranges_of
from draftree.sampling.grammar.rules import characters

__all__ = ["require_bounded_grammar", "with_valid_classes"]

MAX_CHARACTERS = 2**18
"""Maximum length of a grammar."""
MAX_DEPTH = 128
"""Maximum nesting of brackets."""
MAX_OPTIONAL = 48
"""Optional parts of one rule; compile time is quadratic in them."""
MAX_PARTS = 4096
"""Repeated parts, each counted with its maximum number of repetitions; * and + count once."""

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
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are compiled: shorten it")
    _require_unicode(text)
    bare = _LITERALS.sub(lambda found: " " * len(found[0]) if found[0][0] == "#" else "." * len(found[0]), text)
    for place, character in enumerate(bare):
        if not character.isascii():
            line = text.count("\n", 0, place) + 1
            column = place - text.rfind("\n", 0, place)
            raise ValueError(
                f"{character!r} at line {line}, column {column} is outside a literal, where only ASCII is allowed: "
                'delete it, or write it in "..."'
            )
    depth = 0
    for bracket in bare:
        depth += (bracket in "([{") - (bracket in ")]}")
        if depth > MAX_DEPTH:
            raise ValueError(f"its brackets are nested deeper than {MAX_DEPTH} levels: flatten it")
    for rule in bare.split("::="):
        count = len(_OPTIONAL.findall(rule))
        if count > MAX_OPTIONAL:
            raise ValueError(
                f"it has {count} optional parts (by ? or an empty alternative) in one rule, and at most {MAX_OPTIONAL} "
                "are compiled: write a repetition such as {0,3}, or alternatives"
            )
    _require_few_parts(bare)


def with_valid_classes(text: str) -> str:
    """Return EBNF whose classes have no half surrogate pairs, which are no characters; others stay as they are."""

    def replaced(found: re.Match[str]) -> str:
        if found[1] is not None:
            return found[0]
        ranges = _ranges(found[3])
        if ranges is None or not (found[2] or any(low < 0xD800 and high > 0xDFFF for low, high in ranges)):
            return found[0]
        valid = ranges_of(ranges)
        return characters(complement(valid) if found[2] else valid)

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
        low = high = codes[place][0]
        if place + 2 < len(codes) and codes[place + 1][1]:
            high = codes[place + 2][0]
            place += 2
        pairs.append((low, high))
        place += 1
    return tuple(pairs) if all(low <= high <= 0x10FFFF for low, high in pairs) else None


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair, which is not a character") from error
    for found in _CODE_POINT.finditer(text):
        digits = next(filter(None, found.groups()), "").lstrip("0")
        if len(digits) == 4 and 0xD800 <= int(digits, 16) <= 0xDFFF:
            raise ValueError(
                f"{found[0]} is half of a surrogate pair, which is not a character: write the intended character"
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
