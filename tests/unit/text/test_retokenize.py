"""Texts in the tokens of another tokenizer: bytes of tokens, common tokens, continuations, and growing texts."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.errors import VocabularyMismatchError
from draftree.text.retokenize import (
    CONTEXT_TOKENS,
    Lexicon,
    Rereading,
    common_tokens,
    complete,
    encode_continuation,
    lexicon_of,
    read_specials,
)
from draftree.text.tokenizer import Tokenizer
from text_backends import byte_fallback, byte_fallback_unstripped, byte_level, metaspace, word_piece

BACKENDS = {"bytes": byte_level, "fallback": byte_fallback, "unstripped": byte_fallback_unstripped}
TEXTS = [
    "the quick brown fox",
    "  two spaces, then\ttabs",
    "one\r\ntwo\r\n\r\n\nthree",
    "東京は日本の首都です。",
    "日本日本",
    "😀🎉🎉",
    "👨‍👩‍👧 and 🇯🇵",
    "nai\u0308ve cafe\u0301",
    "½ — “…”",
    "</s> is spelled",
]


@functools.cache
def lexicon(name: str) -> Lexicon:
    return lexicon_of(Tokenizer(BACKENDS[name](), name=name))


every = pytest.mark.parametrize("name", BACKENDS)


@every
@given(data=st.binary(max_size=24))
def test_any_bytes_can_be_spelled(name: str, data: bytes) -> None:
    one = lexicon(name)
    assert one.text_of(one.read(data, begins=False)) == data
    assert one.text_of(one.spell(data)) == data


def test_a_text_begins_with_what_the_tokenizer_puts_there() -> None:
    assert lexicon("fallback").text_of(lexicon("fallback").read(b"the", begins=True)) == b" the"
    assert lexicon("bytes").text_of(lexicon("bytes").read(b"the", begins=True)) == b"the"
    assert [lexicon(name).strips_first_space for name in BACKENDS] == [False, True, False]


def test_special_tokens_have_no_bytes_and_are_spelled_in_text() -> None:
    one = lexicon("bytes")
    assert [one.token_bytes(i) for i in one.specials.values()] == [None] * len(one.specials)
    assert one.token_bytes(len(one.bytes_of)) is None
    assert not set(one.read(b"a</s>b<|im_end|>", begins=False)) & set(one.specials.values())


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (b"", b""),
        (b"ab", b"ab"),
        ("日本".encode(), "日本".encode()),
        ("日本".encode()[:-1], "日".encode()),
        ("日本".encode()[:-2], "日".encode()),
        ("a😀".encode()[:-1], b"a"),
        ("é".encode()[:1], b""),
        ("é".encode(), "é".encode()),
        (b"\x80\x80\x80\x80\x80", b"\x80\x80\x80\x80\x80"),
    ],
)
def test_an_unfinished_character_is_cut_off(data: bytes, kept: bytes) -> None:
    assert complete(data) == kept


def test_common_tokens_have_equal_bytes() -> None:
    target, draft = lexicon("fallback"), lexicon("bytes")
    common = common_tokens(target, draft, target_size=10_000, draft_size=10_000)
    said = [
        (target.token_bytes(t), draft.token_bytes(d)) for t, d in zip(common.target_ids, common.draft_ids, strict=True)
    ]
    assert all(a == b for a, b in said)
    assert len(set(common.target_ids)) == len(set(common.draft_ids)) == len(common)
    assert {b"a", b" ", "日".encode(), b"\xf0"} <= {a for a, _ in said if a}
    assert target.eos_id in common.target_ids
    assert common.draft_ids[common.target_ids.index(target.eos_id)] == draft.eos_id  # type: ignore[arg-type]
    assert 0 < common.draft_share < 1
    assert 0 < common.target_share < 1


def test_ids_beyond_the_logits_are_not_in_common() -> None:
    target, draft = lexicon("fallback"), lexicon("bytes")
    common = common_tokens(target, draft, target_size=100, draft_size=90)
    assert max(common.target_ids) < 100
    assert max(common.draft_ids) < 90


def test_a_vocabulary_has_all_tokens_in_common_with_itself() -> None:
    one = lexicon("unstripped")
    common = common_tokens(one, one, target_size=10_000, draft_size=10_000)
    assert common.target_ids == common.draft_ids
    assert common.draft_share == common.target_share == 1


def test_special_tokens_map_to_their_counterparts() -> None:
    target, draft = lexicon("bytes"), lexicon("fallback")
    read = read_specials(target, draft)
    assert read[target.specials["</s>"]] == (draft.eos_id,)
    assert read[target.specials["<s>"]] == read[target.specials["<unk>"]] == ()
    assert read[target.specials["<|im_start|>"]] == (draft.specials["<|im_start|>"],)


@every
@pytest.mark.parametrize("text", TEXTS)
def test_a_continuation_of_any_token_has_the_exact_bytes(name: str, text: str) -> None:
    one = lexicon(name)
    ids = one.read(text.encode(), begins=True)
    for place in range(1, len(ids)):
        rest = one.text_of(ids[place:])
        assert one.text_of(encode_continuation(one, ids[:place], rest)) == rest


@every
def test_a_continuation_is_split_as_the_whole_text(name: str) -> None:
    one = lexicon(name)
    ids = one.read(b"The quick brown fox jumps over the lazy dog", begins=True)
    for place in range(1, len(ids)):
        assert encode_continuation(one, ids[:place], one.text_of(ids[place:])) == ids[place:]


@every
def test_an_existing_cut_inside_a_token_is_kept(name: str) -> None:
    one = lexicon(name)
    whole = one.read(b"the fox", begins=False)
    letters = one.spell(b"t") + one.spell(b"h")
    assert letters + encode_continuation(one, letters, b"e fox") != whole
    assert one.text_of(encode_continuation(one, letters, b"e fox")) == b"e fox"


@every
def test_a_draft_that_ends_inside_a_character_ends_before_it(name: str) -> None:
    one = lexicon(name)
    before = one.read(b"the", begins=True)
    assert one.text_of(encode_continuation(one, before, " 😀".encode()[:-1])) == b" "
    started = [*before, *one.spell("😀".encode()[:2])]
    assert one.text_of(encode_continuation(one, started, "😀".encode()[2:] + b" a")) == "😀".encode()[2:] + b" a"
    assert encode_continuation(one, started, "😀".encode()[2:3]) == []


def test_bytes_that_start_no_token_are_left_out() -> None:
    one = lexicon_of(Tokenizer(metaspace()))
    assert one.text_of(one.spell("q☃q".encode())) == b"qq"


def test_a_tokenizer_with_context_dependent_tokens_is_refused() -> None:
    with pytest.raises(VocabularyMismatchError, match="depends on the tokens around them"):
        lexicon_of(Tokenizer(word_piece()))


PAIRS = [pair for pair in itertools.product(BACKENDS, repeat=2) if pair[0] != pair[1]]
every_pair = pytest.mark.parametrize(("source", "own"), PAIRS)
LONG = " ".join(["The quick brown fox jumps over the lazy dog; the dog sleeps on, and the fox is gone."] * 4)


def reading(source: str, own: str) -> Rereading:
    return Rereading(lexicon(source), lexicon(own), read_specials(lexicon(source), lexicon(own)))


def said(one: Rereading, own: str) -> bytes:
    """Its bytes without the space that a tokenizer adds before a text."""
    return lexicon(own).text_of(one.tokens)


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
