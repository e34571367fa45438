"""Wrapping changes only line breaks."""

from __future__ import annotations

import re
import textwrap

from hypothesis import given
from hypothesis import strategies as st

from draftree.cli.runs import Wrapping
from draftree.engine.sequence import Piece

TEXT = st.text(alphabet="ab \n", max_size=60)


def wrapped(texts: list[str], width: int) -> list[Piece]:
    wrapping = Wrapping(width)
    shown = [piece for text in texts for piece in wrapping.push([Piece(text, drafted=bool(len(text) % 2))])]
    return [*shown, *wrapping.finish()]


@given(st.lists(TEXT.filter(bool)), st.integers(1, 12))
def test_words_and_line_breaks_stay_and_lines_are_short(texts: list[str], width: int) -> None:
    shown = "".join(piece.text for piece in wrapped(texts, width))
    whole = "".join(texts)
    assert shown.split() == whole.split()
    assert shown.count("\n") >= whole.count("\n")
    for line in shown.split("\n"):
        assert len(line.rstrip(" ")) <= width or len(line.split()) <= 1


@given(st.lists(TEXT.filter(bool)))
def test_short_lines_lose_only_trailing_spaces(texts: list[str]) -> None:
    shown = "".join(piece.text for piece in wrapped(texts, 10_000))
    assert shown == re.sub(r" +(\n|\Z)", r"\1", "".join(texts))


@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=8), min_size=1), st.integers(8, 30), st.data())
def test_it_agrees_with_the_standard_library_however_the_text_is_cut(
    words: list[str], width: int, data: st.DataObject
) -> None:
    text = " ".join(words)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert "".join(piece.text for piece in wrapped(pieces, width)) == textwrap.fill(text, width)


def test_colours_stay_with_their_letters() -> None:
    wrapping = Wrapping(80)
    shown = [*wrapping.push([Piece("light", drafted=True), Piece("house ", drafted=False)]), *wrapping.finish()]
    assert [(piece.text, piece.drafted) for piece in shown] == [("light", True), ("house", False)]
