"""Limits for regular expressions and EBNF, and detection of regular expression features that are not enforced.

xgrammar reads an unknown escape as its letter, ignores a group's flags or look-ahead in patterns of strings, and keeps
a quotation mark in them, which would end the JSON string.
"""

from __future__ import annotations

import re

MAX_CHARACTERS = 2**15
"""Maximum length of a regular expression or of a grammar."""
MAX_DEPTH = 128
"""Maximum nesting of brackets in a regular expression or in a grammar."""

MAX_OPTIONAL = 48
"""Optional parts of an expression or of one rule of a grammar; compile time is quadratic in them."""
MAX_PARTS = 4096
"""Repeated parts of an expression, each counted with its maximum number of repetitions; * and + count once."""

_ESCAPES_AND_CLASSES = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", flags=re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", flags=re.DOTALL)
_KNOWN_ESCAPES = "dDwWsSnrtfvxuc"
_LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*', flags=re.DOTALL)
_SYMBOL = re.compile(r"\{(\d*)(,?)(\d*)\}|\w|\S")
_NAME_OR_SYMBOL = re.compile(r"\{(\d*)(,?)(\d*)\}|[\w-]+|\S")
_GROUP_MARK = re.compile(r"\(\?(?!:|<[A-Za-z_]\w*>)")
_TWO_QUANTIFIERS = re.compile(r"[*+?}][*+]")
_CODE = re.compile(r"\\(?:\\|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|.)", flags=re.DOTALL)
_CODE_POINT = re.compile(
    r"\\(?:\\|x([0-9a-fA-F]+)|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\}|U([0-9a-fA-F]{8})|.)", flags=re.DOTALL
)
"""Escapes as xgrammar reads them: all digits after an x are one number."""
_OPTIONAL = re.compile(r"\?|[(|]\s*(?=[)|])")
_CONTROL = re.compile(r"\\[nrtfv0c]")
_QUOTE, _BACKSLASH = 0x22, 0x5C


def require_bounded_regex(text: str) -> None:
    """Raise ValueError for a regular expression that is too long, too deep or not valid Unicode."""
    bare = _ESCAPES_AND_CLASSES.sub(".", text)
    _require_bounded(text, bare)
    expression = re.sub(r"\(\?(?:[:=!]|<\w*>)", "(", bare)
    _require_few_optional(expression)
    _require_few_parts(_SYMBOL, expression)


def require_bounded_grammar(text: str) -> None:
    """Raise ValueError for EBNF that is too long, too deep or not valid Unicode."""
    bare = _LITERALS.sub(lambda found: "" if found[0][0] == "#" else ".", text)
    _require_bounded(text, bare)
    for rule in bare.split("::="):
        _require_few_optional(rule)
    _require_few_parts(_NAME_OR_SYMBOL, bare)


def _require_bounded(text: str, bare: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are compiled: shorten it")
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
    depth = 0
    for bracket in bare:
        depth += (bracket in "([{") - (bracket in ")]}")
        if depth > MAX_DEPTH:
            raise ValueError(f"its brackets are nested deeper than {MAX_DEPTH} levels: flatten it")


def _require_few_optional(expression: str) -> None:
    """Bound optional parts; escapes, classes and literals are single characters here."""
    count = len(_OPTIONAL.findall(expression))
    if count > MAX_OPTIONAL:
        raise ValueError(
            f"it has {count} optional parts (by ? or an empty alternative), and at most {MAX_OPTIONAL} are compiled: "
            "write a repetition such as {0,3}, or alternatives"
        )


def _require_few_parts(symbols: re.Pattern[str], bare: str) -> None:
    """Bound the expanded size of repetitions in an expression, in which literals are single characters."""
    sizes, last, parts = [0], 0, 0
    for symbol in symbols.finditer(bare):
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


def unenforced(pattern: str) -> str | None:
    """Return the part of a regular expression that a grammar would ignore; None if there is none."""
    bare = _bare(pattern)
    if "^" in bare[1:] or "$" in bare[:-1]:
        return "^ and $ are allowed only at its ends, where they have no effect"
    if any(len(found[1] or "") > 2 for found in _CODE_POINT.finditer(pattern)):
        return "the escape \\x followed by more than two digits is read as one number: write \\u and four digits"
    letters = (found[1] for found in _ESCAPE.finditer(pattern) if found[1].isascii() and found[1].isalpha())
    letter = next((letter for letter in letters if letter not in _KNOWN_ESCAPES), None)
    if letter is not None:
        return f"the escape \\{letter} is not known: write the characters themselves, or a class of them"
    group = _GROUP_MARK.search(bare)
    if group is not None:
        return "look-around and flags in (?...) are not known: write (...) or (?:...)"
    if _TWO_QUANTIFIERS.search(bare):
        return "two quantifiers in a row are not known: keep one of them"
    return None


def unenforced_in_string(pattern: str) -> str | None:
    """Return the same for a pattern of JSON strings, in which quotation marks and backslashes are escaped."""
    if '"' in pattern or "\\\\" in pattern or any(ord(character) < 0x20 for character in pattern):
        return "a quotation mark, a backslash and a control character cannot stand for themselves in JSON"
    try:
        require_bounded_regex(pattern)
    except ValueError as error:
        return str(error)
    codes = [int(next(filter(None, found.groups())), 16) for found in _CODE.finditer(pattern) if any(found.groups())]
    if {_QUOTE, _BACKSLASH} & set(codes):
        return "a quotation mark and a backslash cannot stand for themselves in JSON"
    outside = _ESCAPES_AND_CLASSES.sub(lambda found: found[0] if found[0][0] == "\\" else "..", pattern)
    if _CONTROL.search(outside):
        return "a control character cannot stand for itself in JSON"
    return unenforced(pattern)


def _bare(pattern: str) -> str:
    return _ESCAPES_AND_CLASSES.sub("..", pattern)
