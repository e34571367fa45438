"""Incremental detokenization: the text that each token completes, by the kind of tokenizer.

Returned text never changes. `TextStream` is the interface; one class per kind of tokenizer implements it.

Almost every causal language model has a byte-level or a byte-fallback tokenizer. For these a table of the bytes of each
id gives the text without calling the tokenizer. Any other tokenizer decodes a short window of ids at a time. A scheme
is used only if it reproduces the tokenizer's own decoding of a fixed set of random id sequences; if none does, the text
is withheld until it is complete.
"""

from __future__ import annotations

import codecs
import json
import logging
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

Decode = Callable[[Sequence[int]], str]

BROKEN = "\ufffd"
BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>", re.ASCII)


class TextStream(ABC):
    """The text of one sequence, in pieces."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""

    @abstractmethod
    def num_held_before(self, token_id: int) -> int:
        """Return the number of characters that are held back and precede the text of this token, if it came next."""

    @abstractmethod
    def finish(self) -> str:
        """Return the remaining text; the stream is not used again."""

    @abstractmethod
    def follow(self, ids: Sequence[int]) -> None:
        """Continue the text of these ids, which is not returned, instead of starting a text; call before any push."""


def byte_of_name(token: str) -> int | None:
    """Return the byte of a token of the form <0xE6>; None for any other token."""
    if len(token) != 6:
        return None
    match = BYTE_NAME.fullmatch(token)
    return int(match[1], 16) if match else None


def text_after(shown: str, text: str) -> str:
    """Return the part of `text` after `shown`; "" if `text` does not start with it."""
    return text[len(shown) :] if text.startswith(shown) else ""


@dataclass(frozen=True, slots=True)
class FallbackDecoding:
    """The decoding rules of a byte-fallback tokenizer."""

    replacements: tuple[tuple[str, str], ...]  # (old, new) pairs, applied to each token in this order
    strip_character: str  # character that is removed from the beginning of the text
    strip_count: int  # maximum number of removed characters

    def part_of(self, token: str) -> str | int:
        """Return the text or, as a number, the byte of a token in its vocabulary form."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        byte = byte_of_name(token)
        return token if byte is None else byte

    def bytes_of(self, token: str) -> bytes:
        part = self.part_of(token)
        return bytes([part]) if isinstance(part, int) else part.encode("utf-8")


class ByteFallbackStream(TextStream):
    """Stream in which a token is text or, if named <0x00> to <0xFF>, one byte.

    A run of byte tokens is text only if all of its bytes together are UTF-8; if not, each becomes U+FFFD, even
    those that form characters. So a run is held back until it ends.
    """

    def __init__(self, part_of: Callable[[int], str | int | None], decoding: FallbackDecoding) -> None:
        self._part_of = part_of
        self._strip_character = decoding.strip_character
        self._strip_left = decoding.strip_count
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        part = self._part_of(token_id)
        if part is None:
            return ""
        if isinstance(part, int):
            self._run.append(part)
            return ""
        return self._stripped(self._end_run() + part)

    def num_held_before(self, token_id: int) -> int:
        """Return the characters of the run of bytes; before a byte that may continue it those that are complete."""
        part = self._part_of(token_id)
        if isinstance(part, int) and not _breaks(self._run, bytes([part])):
            return len(self._run.decode("utf-8", errors="ignore"))
        return len(self._run) if isinstance(part, int) else len(_text_of(self._run))

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def follow(self, ids: Sequence[int]) -> None:
        """Turn stripping off: only the beginning of a text is stripped."""
        if ids:
            self._strip_left = 0

    def _end_run(self) -> str:
        text = _text_of(self._run)
        self._run.clear()
        return text

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_character:
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        return text


def _breaks(before: bytes | bytearray, following: bytes) -> bool:
    """Return whether bytes are no UTF-8, whatever comes after them."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(bytes(before) + following[:1])
    except UnicodeDecodeError:
        return True
    return False


def _text_of(run: bytearray) -> str:
    try:
        return run.decode("utf-8")
    except UnicodeDecodeError:
        return BROKEN * len(run)


class ByteLevelStream(TextStream):
    """Stream in which every token is bytes, and the text is these bytes decoded as UTF-8."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._reader.decode(self._bytes_of(token_id))

    def num_held_before(self, token_id: int) -> int:
        """Return 1 after an incomplete character that this token does not continue: it becomes U+FFFD."""
        before, _ = self._reader.getstate()
        return int(bool(before) and _breaks(before, self._bytes_of(token_id)))

    def finish(self) -> str:
        return self._reader.decode(b"", final=True)

    def follow(self, ids: Sequence[int]) -> None:
        """No-op: the beginning of a text is not special."""


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a token in its vocabulary form."""
    alphabet = byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode("utf-8")  # an added token is stored verbatim


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the bytes by the characters that byte-level tokenizers write for them.

    A printable character of Latin-1 stands for its own code; the other bytes, in order, are written as the
    characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class WindowStream(TextStream):
    """Stream that decodes the last few ids for every token; for tokenizers of an unknown kind.

    Assumes that text depends on ids nearby only, that at most three U+FFFD at its end may still become a
    character, and that nothing before them changes.
    """

    CONTEXT = 8
    TAIL = 4

    def __init__(self, decode: Decode, byte_ids: frozenset[int]) -> None:
        self._decode = decode
        self._byte_ids = byte_ids  # the tokens <0x00> to <0xFF>
        self._window: list[int] = []
        self._shown = ""  # the part of the window's text that was returned
        self._slide_beyond = 2 * self.CONTEXT

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""  # as in ByteFallbackStream: a run has text only at its end
        text = self._decode(self._window)
        certain = text
        for _ in range(3):
            certain = certain.removesuffix(BROKEN)
        piece = text_after(self._shown, certain)
        self._shown += piece
        if len(self._window) > self._slide_beyond:
            self._slide(text)
        return piece

    def num_held_before(self, token_id: int) -> int:
        """Return the characters of the window that were not returned; before a byte those that are complete."""
        held = text_after(self._shown, self._decode(self._window)) if self._window else ""
        return len(held.rstrip(BROKEN) if token_id in self._byte_ids else held)

    def finish(self) -> str:
        return text_after(self._shown, self._decode(self._window)) if self._window else ""

    def follow(self, ids: Sequence[int]) -> None:
        self._window = list(ids[-self.CONTEXT :])
        self._shown = self._decode(self._window) if self._window else ""

    def _slide(self, text: str) -> None:
        """Drop the oldest ids if the text continues in the same way without them."""
        rest = text_after(self._shown, text)
        shorter = self._decode(self._window[self.CONTEXT :])
        shown = shorter.removesuffix(rest)
        tail = shown.lstrip(BROKEN)[-self.TAIL :]
        # a window without visible text could take a later token for the first one of all
        if shown + rest == shorter and tail.strip() and self._shown.endswith(tail):
            del self._window[: self.CONTEXT]
            self._shown = shown
            self._slide_beyond = 2 * self.CONTEXT
        else:
            self._slide_beyond = len(self._window) + self.CONTEXT


class WithheldStream(TextStream):
    """Stream that returns the whole text at the end; for tokenizers whose text changes as tokens follow."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: list[int] = []
        self._ids: list[int] = []

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return ""

    def num_held_before(self, token_id: int) -> int:
        return len(self._text())

    def finish(self) -> str:
        return self._text()

    def _text(self) -> str:
        if not self._ids:
            return ""
        return text_after(self._decode(self._before), self._decode(self._before + self._ids))

    def follow(self, ids: Sequence[int]) -> None:
        self._before = list(ids)


logger = logging.getLogger(__name__)

CHECK_SEQUENCES = 24
CHECK_LENGTH = 48


@dataclass(frozen=True, slots=True)
class TextScheme:
    """An incremental detokenization scheme."""

    open: Callable[[], TextStream]  # opens a stream for one sequence
    skipped: frozenset[int]  # ids that are dropped before the stream
    streams: bool = True  # whether text is available before the sequence is complete

    def text_of(self, ids: Iterable[int]) -> str:
        stream = self.open()
        pieces = [stream.push(i) for i in ids if i not in self.skipped]
        return "".join(pieces) + stream.finish()


def choose_scheme(decode: Decode, tokens: Mapping[int, str], *, skipped: frozenset[int], decoder: Any) -> TextScheme:
    """Return the cheapest scheme that reproduces `decode`.

    `decoder`: the decoder object of the `tokenizers` library, if the tokenizer has one.
    """
    byte_ids = frozenset(i for i, token in tokens.items() if byte_of_name(token) is not None)
    candidates: list[Callable[[], TextStream]] = [partial(WindowStream, decode, byte_ids)]
    decoding = _decoding(decoder)
    if isinstance(decoding, FallbackDecoding):
        part_of = cache(lambda token_id: decoding.part_of(tokens[token_id]) if token_id in tokens else None)
        candidates.insert(0, partial(ByteFallbackStream, part_of, decoding))
    elif decoding is not None:
        candidates.insert(0, partial(ByteLevelStream, cache(lambda token_id: decoding(tokens.get(token_id, "")))))
    checks = [(ids, decode(ids)) for ids in _check_sequences(tokens, byte_ids, skipped)]
    for opener in candidates:
        scheme = TextScheme(opener, skipped)
        if all(scheme.text_of(ids) == text for ids, text in checks):
            return scheme
    logger.warning("the text of this tokenizer cannot be streamed: each text is returned when its sequence is complete")
    return TextScheme(partial(WithheldStream, decode), frozenset(), streams=False)


def bytes_by_token(decoder: Any) -> Callable[[str], bytes] | None:
    """Return a function from a token's written form to its bytes inside a text; None for an unknown kind of decoder.

    `decoder`: the decoder object of the `tokenizers` library, if the tokenizer has one.
    """
    decoding = _decoding(decoder)
    return decoding.bytes_of if isinstance(decoding, FallbackDecoding) else decoding


def _decoding(decoder: Any) -> Callable[[str], bytes] | FallbackDecoding | None:
    """Return the bytes of a token in a byte-level vocabulary, or the rules of a byte-fallback one; None for others."""
    steps = _decoder_steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
        return byte_level_bytes
    num_replaces = next((i for i, kind in enumerate(kinds) if kind != "Replace"), len(kinds))
    if kinds[num_replaces:] not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return None
    patterns: list[tuple[Any, Any]] = [
        (step.get("pattern", {}).get("String"), step.get("content")) for step in steps[:num_replaces]
    ]
    strip: dict[str, Any] = steps[-1] if kinds[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    if strip["stop"] or not all(old and isinstance(new, str) for old, new in patterns):
        return None
    return FallbackDecoding(tuple(patterns), strip_character=strip["content"], strip_count=strip["start"])


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """Return the steps of a decoder object; empty if it does not describe them."""
    try:
        description = json.loads(decoder.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return []
    return _flatten(description) if isinstance(description, dict) else []


def _flatten(description: dict[str, Any]) -> list[dict[str, Any]]:
    if description.get("type") != "Sequence":
        return [description]
    return [step for part in description.get("decoders", []) for step in _flatten(part)]


def _check_sequences(tokens: Mapping[int, str], byte_ids: frozenset[int], skipped: frozenset[int]) -> list[list[int]]:
    """Return reproducible random ids; short and byte tokens, where characters break, are frequent."""
    everything = sorted(tokens)
    short = [i for i in everything if len(tokens[i]) <= 2] or everything
    pools = (everything, short, sorted(byte_ids) or short, sorted(skipped) or everything)
    source = random.Random(0)
    sequences = []
    for number in range(CHECK_SEQUENCES if everything else 0):
        allowed = pools if number % 2 else (pools[number // 2 % 3],)  # mixed, and of one kind
        length = source.randint(1, CHECK_LENGTH)
        sequences.append([source.choice(source.choice(allowed)) for _ in range(length)])
    return sequences
