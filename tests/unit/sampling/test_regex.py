r"""Regular expressions under a grammar match what Python matches; the parts in which dialects differ are refused."""

from __future__ import annotations

import itertools
import re

import pytest

from draftree import SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.sampling.grammar.languages import Languages
from draftree.sampling.grammar.regex import language, parse
from draftree.sampling.history import History
from schema_samples import END, STRING, everything

EXPRESSIONS = [
    "a",
    "a|b|",
    "[^a]",
    "(ab)*c?",
    "^a|b$",
    "a^b",
    "(?:^a|b)c*",
    r"(?!\.)(?!.*\.\.)[a.]*b",
    "(?=ab)a.",
    "a{2,3}?",
    "a{1,}b{0,1}",
    "a?$b?",
    "b.a",
    r"[a\n-]{0,2}$",
    "^$",
    "c*^a",
    "(?P<name>a)(?<other>b)",
    r"[.\]^]+|\x61\u0062",
    "[a-c]+?$",
]


@pytest.mark.parametrize("is_search", [False, True])
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_matches_what_python_matches(expression: str, is_search: bool) -> None:
    """Python's `$` also matches before a last newline, and it names groups by `?P` only."""
    theirs = re.compile(expression.replace("$", r"\Z").replace("(?<o", "(?P<o"))
    made = Languages()
    mine = language(parse(expression), made, is_search=is_search)
    for size in range(5):
        for signs in itertools.product("abc.\n", repeat=size):
            text = "".join(signs)
            expected = theirs.search(text) if is_search else theirs.fullmatch(text)
            assert made.matches(mine, text) == (expected is not None), text


def matches(expression: str, text: bytes) -> bool:
    return follows(SamplingParams(regex=expression), text)


def follows(params: SamplingParams, text: bytes) -> bool:
    (found,) = everything().open(params, [END]).allowed(History([0]), [(*text, END)])
    return found is not None


@pytest.mark.parametrize(
    ("expression", "good", "bad"),
    [
        (".", "é", "\n"),
        (".", "]", "\u2028"),
        (r"[\s\S]", "\n", ""),
        (r"\d", "7", "٣"),
        (r"\w", "z", "é"),
        (r"\s", "\u00a0", "x"),
        (r"\p{L}", "é", "7"),
        (r"\P{Lu}", "é", "É"),
        (r"\ud83d\ude00|\u{1f601}", "😀", "\U0001f602"),
        (r"\cA", "\x01", "A"),
        (r"[\b]", "\b", "b"),
        ("^a$", "a", "a\n"),
        (r"\x41B", "AB", "A"),
    ],
)
def test_the_dialect_is_ecmascripts(expression: str, good: str, bad: str) -> None:
    assert matches(expression, good.encode())
    assert not matches(expression, bad.encode())


@pytest.mark.parametrize("expression", [".", r"\S", "[^a]", r"\W", r"[\s\S]", r"[\x80-\u{10ffff}]"])
def test_no_text_has_bytes_that_are_not_utf8(expression: str) -> None:
    assert matches(expression, "😀".encode())
    for wrong in (
        b"\xed\xa0\x80",
        b"\xed\xbf\xbf",
        b"\xc0\x80",
        b"\xe0\x80\x80",
        b"\xf4\x90\x80\x80",
        b"\xff",
        b"\x80",
    ):
        assert not matches(expression, wrong)
        assert not follows(SamplingParams(json_schema={**STRING, "pattern": expression}), b'"' + wrong + b'"')


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(a", "parenthesis is not closed"),
        ("a)", "a parenthesis is closed that is not open"),
        ("[]a]", "a class begins with ]"),
        ("[^]a]", "a class begins with ]"),
        ("[a", "a class is not closed"),
        ("[z-a]", "must have its lower end first"),
        ("a++", "two quantifiers in a row"),
        ("*a", "nothing that '\\*' could repeat"),
        ("a{,3}", "'{' begins no count"),
        ("a{3,1}", "maximum below its minimum"),
        (r"(a)\1", r"\\1 is not supported"),
        (r"\bа", r"\\b is not supported"),
        (r"\p{Nonsense}", "'Nonsense' is not known"),
        ("(?i)a", "flags"),
        ("(?<=a)b", "look-behind"),
        ("a\\", r"a \\ at the end"),
        (r"[a\ud800]", "half of a surrogate pair"),
        (r"\u{110000}", "no character 0x110000"),
        ("a{99}" * 50, "more than 4096 parts"),
        ("(((a{99}){99}){99}){99}", "more than 4096 parts"),
        ("a?" * 300, "more than 48 optional parts"),
        ("(a|)" * 300, "more than 48 optional parts"),
        ("(" * 300 + "a" + ")" * 300, "deeper than 128"),
        ("a" * 40_000, "40000 characters"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_with_its_place(expression: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        SamplingParams(regex=expression)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [("(^a)*", "in a repetition"), ("a^b", "no text matches"), ("(?=.{3000})a*", "more than 1024 states")],
)
def test_what_has_no_grammar_is_refused_when_it_is_compiled(expression: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        everything().compile(SamplingParams(regex=expression))


@pytest.mark.parametrize("expression", ["x?" * 48 + "y*" * 900, "^" + "ab" * 9000 + "$", "(?=a)" * 300 + "a", "(a*)*b"])
def test_long_expressions_need_no_recursion(expression: str) -> None:
    SamplingParams(regex=expression)
    made = Languages()
    assert not made.matches(language(parse(expression), made, is_search=False), "c")
