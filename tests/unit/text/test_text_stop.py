"""Stop strings, compared with their definition on the whole text."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.errors import InvalidRequestError
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
        state = checker.push(piece)
        read += piece
        shown += state.text
        assert state.num_pieces == 1
        assert expected.text.startswith(shown), "text was shown that is not part of the output"
        if state.matched is not None:
            assert len(read) >= expected.end > len(read) - len(piece)
            break
        held = 0 if include else longest_beginning(read, stop)
        assert shown == read[: len(read) - held], "the longest suffix that could become a stop string is not held back"
    assert checker.matched == expected.matched
    assert shown + checker.flush() == expected.text
    assert checker.flush() == ""


@given(pieces=PIECES, stop=STOPS, include=st.booleans())
def test_a_round_of_pieces_gives_what_single_pieces_give(pieces: list[str], stop: list[str], include: bool) -> None:
    together = StopChecker(stop, include_in_output=include)
    state = together.push_all(pieces)
    alone = StopChecker(stop, include_in_output=include)
    shown, count = "", 0
    for piece in pieces:
        single = alone.push(piece)
        shown += single.text
        count += 1
        if single.matched is not None:
            break
    assert (state.text, state.matched, state.num_pieces) == (shown, alone.matched, count)
    assert together.flush() == alone.flush()


@pytest.mark.parametrize(
    ("stop", "pieces", "shown", "matched", "num_pieces"),
    [
        (["aab"], ["a", "a", "a", "b", "c"], "a", "aab", 4),
        (["STOP"], ["go S", "T", "O", "P on"], "go ", "STOP", 4),
        (["\n\n"], ["one\n", "\ntwo"], "one", "\n\n", 2),
        (["b", "abc"], ["abc"], "a", "b", 1),
        (["bc", "abc"], ["a", "b", "c"], "", "abc", 3),
        (["abc", "bc"], ["xab", "c"], "x", "abc", 2),
        (["。"], ["日本", "。"], "日本", "。", 2),
        (["ab"], ["a", "", "", "b"], "", "ab", 4),
        (["ab", "ab"], ["ab"], "", "ab", 1),
    ],
)
def test_examples(stop: list[str], pieces: list[str], shown: str, matched: str, num_pieces: int) -> None:
    checker = StopChecker(stop, include_in_output=False)
    state = checker.push_all(pieces)
    assert (state.text, state.matched, state.num_pieces) == (shown, matched, num_pieces)
    assert checker.flush() == ""


def test_a_long_stop_string_that_nearly_matches_takes_linear_time() -> None:
    checker = StopChecker(["a" * 20_000 + "b"], include_in_output=False)
    assert checker.push_all(["a"] * 20_000 + ["c"]).text == "a" * 20_000 + "c"


@pytest.mark.parametrize("stop", ["end", [""], ["ok", 3]])
def test_bad_stop_strings_are_refused(stop: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"[Ss]top string"):
        StopChecker(stop, include_in_output=False)  # type: ignore[arg-type]
