"""Stop strings, compared with their definition on the whole text."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.text.detokenize import StopChecker


@dataclass(frozen=True)
class Expected:
    text: str
    matched: str | None
    end: int


def definition(text: str, stop: list[str], include: bool) -> Expected:
    """The earliest end wins; of equal ends the longer string."""
    found = [(text.find(entry) + len(entry), -len(entry), entry) for entry in stop if entry in text]
    if not found:
        return Expected(text, None, len(text))
    end, _, entry = min(found)
    return Expected(text[: end if include else end - len(entry)], entry, end)


def longest_beginning(text: str, stop: list[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    return max((n for entry in stop for n in range(1, len(entry)) if text.endswith(entry[:n])), default=0)


PIECES = st.lists(st.one_of(st.text(alphabet="ab", max_size=4), st.text(alphabet="a日😀\n", max_size=3)), max_size=14)
STOPS = st.lists(
    st.one_of(st.text(alphabet="ab", min_size=1, max_size=5), st.sampled_from(["日a", "😀😀", "a\n\n", "日"]))
)


@given(pieces=PIECES, stop=STOPS, include=st.booleans())
def test_pieces_give_what_the_definition_gives(pieces: list[str], stop: list[str], include: bool) -> None:
    expected = definition("".join(pieces), stop, include)
    checker = StopChecker(stop, include_in_output=include)
    shown, read = "", ""
    for piece in pieces:
        shown += checker.push(piece)
        read += piece
        assert expected.text.startswith(shown), "text was shown that is not part of the output"
        if checker.matched is not None:
            assert len(read) >= expected.end > len(read) - len(piece)
            break
        held = 0 if include else longest_beginning(read, stop)
        assert shown == read[: len(read) - held], "the longest suffix that could become a stop string is not held back"
    assert checker.matched == expected.matched
    assert shown + checker.flush() == expected.text
    assert checker.flush() == ""


@pytest.mark.parametrize(
    ("stop", "pieces", "shown", "matched"),
    [
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["STOP"], ["go S", "T", "O", "P on"], "go ", "STOP"),
        (["\n\n"], ["one\n", "\ntwo"], "one", "\n\n"),
        (["b", "abc"], ["abc"], "a", "b"),
        (["bc", "abc"], ["a", "b", "c"], "", "abc"),
        (["abc", "bc"], ["xab", "c"], "x", "abc"),
        (["。"], ["日本", "。"], "日本", "。"),
        (["ab"], ["a", "", "", "b"], "", "ab"),
        (["ab", "ab"], ["ab"], "", "ab"),
    ],
)
def test_examples(stop: list[str], pieces: list[str], shown: str, matched: str) -> None:
    checker = StopChecker(stop, include_in_output=False)
    assert "".join(map(checker.push, pieces)) == shown
    assert checker.matched == matched
    assert checker.flush() == ""


def test_a_long_stop_string_that_nearly_matches_takes_linear_time() -> None:
    checker = StopChecker(["a" * 20_000 + "b"], include_in_output=False)
    assert "".join(map(checker.push, ["a"] * 20_000 + ["c"])) == "a" * 20_000 + "c"
