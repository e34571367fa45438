"""A text that grows token by token, re-encoded by another tokenizer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_text_vocab_map import BACKENDS, TEXTS, lexicon

from draftree.text.retokenize.rereading import CONTEXT_TOKENS, Rereading
from draftree.text.retokenize.vocab_map import read_specials

PAIRS = [pair for pair in itertools.product(BACKENDS, repeat=2) if pair[0] != pair[1]]
every_pair = pytest.mark.parametrize(("source", "own"), PAIRS)
LONG = " ".join(["The quick brown fox jumps over the lazy dog; the dog sleeps on, and the fox is gone."] * 4)


def reading(source: str, own: str) -> Rereading:
    return Rereading(lexicon(source), lexicon(own), read_specials(lexicon(source), lexicon(own)))


def said(one: Rereading, own: str) -> bytes:
    """Its bytes without the space that a tokenizer adds before a text."""
    return lexicon(own).text_of(one.tokens)


@every_pair
@pytest.mark.parametrize("text", [*TEXTS, LONG])
def test_a_text_in_single_tokens_has_the_same_bytes(source: str, own: str, text: str) -> None:
    one = reading(source, own)
    for token in lexicon(source).read(text.encode(), begins=True):
        one.push([token])
    assert said(one, own).decode().lstrip(" ") == text.lstrip(" ")


@every_pair
def test_it_is_split_as_the_whole_text(source: str, own: str) -> None:
    tokens = lexicon(source).read(LONG.encode(), begins=True)
    one, whole = reading(source, own), reading(source, own)
    whole.push(tokens)
    for token in tokens:
        one.push([token])
    written = b" " + LONG.encode() if source == "unstripped" else LONG.encode()
    assert one.tokens == whole.tokens == [*lexicon(own).start, *lexicon(own).read(written, begins=True)]
    assert len(one.tokens) > 3 * CONTEXT_TOKENS, "the window is shorter than the text"


@every_pair
@given(ids=st.lists(st.integers(0, 330), max_size=40), cuts=st.sets(st.integers(0, 40), max_size=6))
def test_any_tokens_in_any_portions(source: str, own: str, ids: list[int], cuts: set[int]) -> None:
    """Invalid bytes, halves of characters, special tokens: unchanged tokens really are unchanged."""
    known = len(lexicon(source).bytes_of)
    ids = [token % known for token in ids]
    plain = [token for token in ids if lexicon(source).token_bytes(token) is not None]
    one, portioned = reading(source, own), reading(source, own)
    one.push(plain)
    ends = [*sorted(cut for cut in cuts if cut < len(plain)), len(plain)]
    start = 0
    for end in ends:
        before = list(portioned.tokens)
        stands = portioned.push(plain[start:end])
        assert portioned.tokens[:stands] == before[:stands]
        assert 0 <= stands <= len(before)
        start = end
    assert said(portioned, own).lstrip(b" ") == said(one, own).lstrip(b" ")
    assert said(one, own).lstrip(b" ") == lexicon(source).text_of(plain).lstrip(b" ")
    reading(source, own).push(ids)


def test_the_seam_goes_back_as_far_as_the_cut_changes() -> None:
    one = reading("bytes", "fallback")
    letters = [lexicon("bytes").ids_of[bytes([byte])] for byte in b"the quick"]
    before = len(lexicon("fallback").read(b"the qui", begins=True))
    one.push(letters[:-2])
    assert one.push(letters[-2:]) < before, "a cut that was made is made otherwise"
    assert one.tokens == lexicon("fallback").read(b"the quick", begins=True)
    held = len(one.tokens)
    assert one.push([lexicon("bytes").ids_of[b"\n"]]) == held, "a new line changes nothing before it"


def test_half_a_character_is_read_as_bytes_until_it_is_whole() -> None:
    one = reading("bytes", "fallback")
    emoji = "😀".encode()
    halves = [lexicon("bytes").ids_of[bytes([byte])] for byte in emoji]
    one.push(halves[:2])
    assert said(one, "fallback") == emoji[:2]
    one.push(halves[2:])
    assert said(one, "fallback").lstrip(b" ") == emoji


def test_special_tokens_stand_between_stretches_of_text() -> None:
    source, own = lexicon("bytes"), lexicon("fallback")
    one = reading("bytes", "fallback")
    one.push([source.specials["<s>"], *source.read(b"one", begins=True), source.specials["</s>"]])
    one.push([source.specials["<|im_start|>"], *source.read(b"two", begins=False)])
    marks = [i for i in one.tokens if own.token_bytes(i) is None]
    assert marks == [own.eos_id, own.specials["<|im_start|>"]]
    assert said(one, "fallback") == b" one two"


def test_an_unknown_special_token_is_read_as_text() -> None:
    source, own = lexicon("bytes"), lexicon("fallback")
    one = Rereading(source, own, {source.specials["<|im_end|>"]: b"<|im_end|>"})
    one.push([*source.read(b"a", begins=True), source.specials["<|im_end|>"]])
    assert said(one, "fallback") == b" a<|im_end|>"


def test_a_stripped_first_space_is_not_encoded() -> None:
    one = reading("fallback", "bytes")
    one.push(lexicon("fallback").read(b"the fox", begins=True))
    assert said(one, "bytes") == b"the fox"
    kept = reading("unstripped", "bytes")
    kept.push(lexicon("unstripped").read(b" the", begins=False))
    assert said(kept, "bytes") == b" the"


def test_nothing_new_changes_nothing() -> None:
    one = reading("bytes", "fallback")
    one.push(lexicon("bytes").read(b"the fox", begins=True))
    before = list(one.tokens)
    assert one.push([]) == len(before)
    assert one.tokens == before
