"""Text that grows token by token equals decoding as a whole, and ends before stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from draftree.core.errors import InvalidRequestError
from draftree.text.detokenize import Detokenizer, StopChecker
from draftree.text.streams import (
    ByteFallbackStream,
    ByteLevelStream,
    WindowStream,
    WithheldStream,
    byte_alphabet,
    byte_of_name,
    choose_scheme,
)
from draftree.text.tokenizer import Tokenizer
from text_backends import CORPUS, OTHER_BACKENDS, TABLE_BACKENDS, byte_fallback, byte_level, metaspace, words

ALL_BACKENDS = TABLE_BACKENDS + OTHER_BACKENDS
MIXED_TEXT = "The fox 日本語は 😀🎉 naïve café 👨‍👩‍👧\n\n\tdef f(x):\n        return x  # 東京"


@cache
def built(backend: Callable[[], object]) -> Tokenizer:
    return Tokenizer(backend())


def pieces_of(
    tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True, prompt: Sequence[int] = (), spaces: bool = True
) -> list[str]:
    detokenizer = Detokenizer(
        tokenizer, skip_special_tokens=skip, spaces_between_special_tokens=spaces, prompt_ids=prompt
    )
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@st.composite
def id_sequences(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Random ids; parts of characters, special tokens and tokens of a real text are frequent."""
    tokens = tokenizer.vocabulary()
    short = [i for i, token in enumerate(tokens) if len(token) == 1 or byte_of_name(token) is not None]
    kinds = [st.integers(0, len(tokens) - 1), st.sampled_from(sorted(tokenizer.special_ids))]
    kinds += [st.sampled_from(pool) for pool in (short, tokenizer.encode(MIXED_TEXT)) if pool]
    return draw(st.lists(st.one_of(kinds), max_size=70))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=50)
@given(data=st.data())
def test_any_ids_give_the_text_that_decode_gives(
    backend: Callable[[], object], skip: bool, data: st.DataObject
) -> None:
    tokenizer = built(backend)
    ids = data.draw(id_sequences(tokenizer))
    assert "".join(pieces_of(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=200)
@given(content=st.lists(st.sampled_from([0x41, 0x80, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE6, 0xED, 0xF0, 0xF4, 0xFF])))
@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
def test_any_bytes_give_the_text_that_decode_gives(backend: Callable[[], object], content: list[int]) -> None:
    tokenizer = built(backend)
    names = {byte: name for name, byte in byte_alphabet().items()} if backend is byte_level else {}
    ids = [tokenizer.vocabulary().index(names.get(byte, f"<0x{byte:02X}>")) for byte in content]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, True)


@pytest.mark.parametrize(("backend", "stream"), [(byte_level, ByteLevelStream), (byte_fallback, ByteFallbackStream)])
@pytest.mark.parametrize("skip", [True, False])
def test_usual_tokenizers_need_no_decoding_while_text_is_written(
    backend: Callable[[], object], stream: type, skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = built(backend)
    scheme = tokenizer.text_scheme(skip_special_tokens=skip)
    assert isinstance(scheme.open(), stream)
    assert tokenizer.text_scheme(skip_special_tokens=skip) is scheme
    ids = tokenizer.encode(MIXED_TEXT)
    expected = tokenizer.decode(ids, skip)
    monkeypatch.setattr(Tokenizer, "decode", lambda *_: pytest.fail("decode was called"))
    assert "".join(pieces_of(tokenizer, ids, skip=skip)) == expected


@pytest.mark.parametrize("backend", OTHER_BACKENDS)
def test_other_tokenizers_decode_a_short_window(backend: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = built(backend)
    assert isinstance(tokenizer.text_scheme(skip_special_tokens=True).open(), WindowStream)
    ids = tokenizer.encode(CORPUS[0] * 20)
    expected = tokenizer.decode(ids, True)
    lengths: list[int] = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
        lengths.append(len(ids))
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    assert "".join(pieces_of(tokenizer, ids)) == expected
    assert len(ids) > 100
    assert max(lengths) <= 3 * WindowStream.CONTEXT
    assert len(lengths) < 1.3 * len(ids)


def test_a_character_is_shown_with_its_last_byte() -> None:
    tokenizer = built(byte_level)
    ids = [tokenizer.vocabulary().index(name) for name in ["a", "ð", "Ł", "ĺ", "Ģ", "b"]]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "😀", "b", ""]
    assert pieces_of(tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]
    assert pieces_of(tokenizer, [ids[1], ids[0], ids[1], ids[2]]) == ["", "\ufffda", "", "", "\ufffd"]


def test_a_run_of_byte_tokens_is_shown_when_it_ends() -> None:
    tokenizer = built(byte_fallback)

    def pieces(*names: str) -> list[str]:
        return pieces_of(tokenizer, [tokenizer.vocabulary().index(name) for name in names])

    assert pieces("T", "<0x0A>", "<0x0A>", "T") == ["T", "", "", "\n\nT", ""]
    assert pieces("<0xE6>", "<0x97>", "<0xA5>") == ["", "", "", "日"]
    # one wrong byte spoils the whole run, even the character before it
    assert pieces("<0xE6>", "<0x97>", "<0xA5>", "<0xFF>", "T") == ["", "", "", "", "\ufffd" * 4 + "T", ""]


def test_special_tokens_are_shown_or_left_out() -> None:
    tokenizer = built(byte_level)
    a, b, special = (tokenizer.vocabulary().index(name) for name in ("a", "b", "<|im_end|>"))
    assert pieces_of(tokenizer, [a, special, b], skip=True) == ["a", "", "b", ""]
    assert pieces_of(tokenizer, [a, special, b], skip=False) == ["a", "<|im_end|>", "b", ""]
    # a special token that is left out does not part the bytes of a character
    first, second = (tokenizer.vocabulary().index(name) for name in ("Ã", "©"))
    assert pieces_of(tokenizer, [first, special, second], skip=True) == ["", "", "é", ""]
    assert pieces_of(tokenizer, [first, special, second], skip=False) == ["", "\ufffd<|im_end|>", "\ufffd", ""]


@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
def test_ids_without_a_token_show_nothing(backend: Callable[[], object]) -> None:
    tokenizer = built(backend)
    beyond = len(tokenizer.vocabulary()) + 7
    ids = [beyond]
    for i in tokenizer.encode("Hi 語 😀"):
        ids += [i, beyond]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, True) == "Hi 語 😀"


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_text_continues_a_prompt(backend: Callable[[], object]) -> None:
    tokenizer = built(backend)
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog", add_special_tokens=False)
    whole = tokenizer.decode(ids, True)
    for cut in range(1, len(ids)):
        prompt, written = ids[:cut], ids[cut:]
        text = "".join(pieces_of(tokenizer, written, prompt=prompt))
        assert tokenizer.decode(prompt, True) + text == whole


def test_the_space_before_the_first_word() -> None:
    for backend in (byte_fallback, metaspace):
        tokenizer = built(backend)
        word = tokenizer.encode("The", add_special_tokens=False)
        assert "".join(pieces_of(tokenizer, word)) == "The"
        assert "".join(pieces_of(tokenizer, word, prompt=word)) == " The"
        assert "".join(pieces_of(tokenizer, word, prompt=[tokenizer.bos_token_id])) == "The"


def test_a_decoder_that_differs_from_its_description_is_not_imitated() -> None:
    tokens = {0: "a", 1: "b", 2: "Ġc"}

    def shouting(ids: Sequence[int]) -> str:
        return "".join(tokens[i] for i in ids).replace("Ġ", " ").upper()

    scheme = choose_scheme(shouting, tokens, skipped=frozenset(), decoder=decoders.ByteLevel())
    assert isinstance(scheme.open(), WindowStream)
    assert scheme.text_of([0, 1, 2, 0] * 20) == "AB CA" * 20


def each_wrong_byte(content: bytes) -> str:
    """Reads UTF-8 as SentencePiece does: every byte that belongs to no character is one U+FFFD."""
    text = ""
    while content:
        for length in (1, 2, 3, 4):
            try:
                text += content[:length].decode()
                break
            except UnicodeDecodeError:
                continue
        else:
            text, length = text + "\ufffd", 1
        content = content[length:]
    return text


def runs_of_wrong_bytes(content: bytes) -> str:
    return content.decode(errors="replace")


def without_outer_spaces(content: bytes) -> str:
    return content.decode(errors="replace").strip()


@pytest.mark.parametrize("reading", [each_wrong_byte, runs_of_wrong_bytes, without_outer_spaces])
@settings(max_examples=150)
@given(text=st.lists(st.sampled_from(["a", "語", "😀", "é", " ", "            ", "\n"])), broken=st.binary(max_size=6))
def test_an_unknown_tokenizer_of_bytes_is_exact_too(
    reading: Callable[[bytes], str], text: list[str], broken: bytes
) -> None:
    def decode(ids: Sequence[int]) -> str:
        return reading(bytes(ids))

    scheme = choose_scheme(decode, {i: chr(i) for i in range(256)}, skipped=frozenset(), decoder=None)
    stream = scheme.open()
    assert isinstance(stream, WindowStream)
    content = "".join(text).encode() * 3 + broken + "語 b".encode() * 3
    shown = ""
    for i in content:
        shown += stream.push(i)
        assert decode(content).startswith(shown)
    assert shown + stream.finish() == decode(content)


def test_an_unknown_tokenizer_shows_a_character_with_its_last_byte() -> None:
    stream = WindowStream(lambda ids: each_wrong_byte(bytes(ids)), frozenset())
    assert [stream.push(i) for i in "a😀語".encode()] == ["a", "", "", "", "😀", "", "", "語"]


def test_text_that_changes_later_is_withheld_and_exact(caplog: pytest.LogCaptureFixture) -> None:
    tokens = {i: chr(97 + i) for i in range(26)}

    def backwards(ids: Sequence[int]) -> str:
        return "".join(tokens[i] for i in reversed(ids))

    scheme = choose_scheme(backwards, tokens, skipped=frozenset(), decoder=None)
    stream = scheme.open()
    assert isinstance(stream, WithheldStream)
    assert [stream.push(i) for i in (0, 1, 2)] == ["", "", ""]
    assert stream.finish() == "cba"
    assert "cannot be streamed" in caplog.text


def test_no_text_at_all() -> None:
    for backend in ALL_BACKENDS:
        assert pieces_of(built(backend), []) == [""]
    scheme = choose_scheme(lambda ids: "", {}, skipped=frozenset(), decoder=None)
    assert scheme.text_of([]) == ""


SPECIAL_AND_OTHER = ["The", "<|im_start|>", "<|im_end|>", "<s>", "fox", "<s>", "dog", "</s>", "</s>"]


def text_without_spaces(tokenizer: Tokenizer, ids: Sequence[int], **given: Any) -> str:
    return "".join(pieces_of(tokenizer, ids, spaces=False, **given))


def test_spaces_are_left_out_between_special_tokens_of_the_output_and_nowhere_else() -> None:
    tokenizer = Tokenizer(words())
    ids = [tokenizer.vocabulary().index(token) for token in SPECIAL_AND_OTHER]
    assert "".join(pieces_of(tokenizer, ids, skip=False)) == tokenizer.decode(ids, False) == " ".join(SPECIAL_AND_OTHER)
    assert text_without_spaces(tokenizer, ids, skip=False) == "The <|im_start|><|im_end|><s> fox <s> dog </s></s>"
    assert text_without_spaces(tokenizer, ids, skip=True) == tokenizer.decode(ids, True)
    assert text_without_spaces(tokenizer, ids[2:4], skip=False, prompt=ids[:2]) == " <|im_end|><s>"


@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
def test_tokenizers_that_write_no_spaces_are_left_as_they_are(backend: object) -> None:
    tokenizer = Tokenizer(backend())  # type: ignore[operator]
    text = "The fox<s></s>\u65e5\u672c<|im_start|><|im_end|> dog<s>"
    ids = tokenizer.encode(text)
    assert text_without_spaces(tokenizer, ids, skip=False) == tokenizer.decode(ids, False)


def test_a_tokenizer_whose_text_cannot_be_streamed_is_refused() -> None:
    tokenizer = Tokenizer(words())
    backwards = choose_scheme(
        lambda ids: "".join(chr(97 + i) for i in reversed(ids)), {0: "a", 1: "b"}, skipped=frozenset(), decoder=None
    )
    assert not backwards.streams
    tokenizer._schemes[False] = backwards
    with pytest.raises(InvalidRequestError, match="spaces_between_special_tokens=False"):
        Detokenizer(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=False)
    Detokenizer(tokenizer, skip_special_tokens=False)


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
