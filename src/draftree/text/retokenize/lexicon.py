"""A tokenizer as a table of bytes: the bytes of each id inside a text, and the id of given bytes.

The only thing that two tokenizers share is the text. Text is bytes here, not characters, since a token may end inside a
character.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from draftree.core.errors import VocabularyMismatchError
from draftree.text.streams.base import byte_of_name
from draftree.text.tokenizer import Tokenizer

SPACE = b" "
NUM_CHECKS, CHECK_LENGTH = 16, 64
"""Random rows of tokens whose decoding is compared with the table when a lexicon is built."""


@dataclass(frozen=True)
class Lexicon:
    """The properties of a tokenizer that are needed to translate text into or out of it.

    Attributes:
        name: name of the tokenizer, for error messages.
        bytes_of: bytes of each id inside a text; None for special tokens and ids without a token.
        byte_ids: ids of single bytes by name (<0xE6>), the last resort of tokenizers that have them.
        specials: ids of special tokens by their written form.
        encode: text to ids, without added tokens, special tokens in it spelled.
        start: ids that the tokenizer adds before a text.
        eos_id: end-of-text token; None if the tokenizer has none.
        bos_id: begin-of-text token; None if the tokenizer has none.
        ignored_ids: special tokens without text: padding, unknown, begin of text.
        strips_first_space: whether decoding drops the first space of a text.
    """

    name: str
    bytes_of: tuple[bytes | None, ...]
    byte_ids: frozenset[int]
    specials: Mapping[str, int]
    encode: Callable[[str], list[int]]
    start: tuple[int, ...]
    eos_id: int | None
    bos_id: int | None
    ignored_ids: frozenset[int]
    strips_first_space: bool

    @cached_property
    def ids_of(self) -> dict[bytes, int]:
        """Ids by their bytes; among several, one that is not a named byte, then the lowest."""
        found: dict[bytes, int] = {}
        for token_id, data in enumerate(self.bytes_of):
            if data and (data not in found or (found[data] in self.byte_ids and token_id not in self.byte_ids)):
                found[data] = token_id
        return found

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.ids_of), default=0)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of an id; None for special tokens and ids outside the table."""
        return self.bytes_of[token_id] if 0 <= token_id < len(self.bytes_of) else None

    def text_of(self, ids: Iterable[int]) -> bytes:
        """Return the joined bytes of ids; special tokens have none."""
        return b"".join(self.token_bytes(i) or b"" for i in ids)

    def spell(self, data: bytes) -> list[int]:
        """Return ids with exactly these bytes, longest match first; bytes that start no token are left out."""
        ids: list[int] = []
        place = 0
        while place < len(data):
            width = min(self._longest, len(data) - place)
            while width and data[place : place + width] not in self.ids_of:
                width -= 1
            if width:
                ids.append(self.ids_of[data[place : place + width]])
            place += width or 1
        return ids

    def read(self, data: bytes, *, begins: bool) -> list[int]:
        """Encode bytes as the tokenizer splits text; bytes that are not valid UTF-8 are spelled.

        Args:
            data: any bytes.
            begins: whether a text begins here: many tokenizers add a space there, which does not belong inside a text.
        """
        ids: list[int] = []
        for number, part in enumerate(_parts(data)):
            if isinstance(part, bytes):
                ids += self.spell(part)
            else:
                ids += self.encode(part) if begins and number == 0 else self._inside(part)
        return ids

    def _inside(self, text: str) -> list[int]:
        ids, data = self.encode(text), text.encode("utf-8")
        if not ids or self.text_of(ids) != SPACE + data:
            return ids
        return self.spell((self.token_bytes(ids[0]) or b"").removeprefix(SPACE)) + ids[1:]


def lexicon_of(tokenizer: Tokenizer) -> Lexicon:
    """Build the table of a tokenizer.

    Raises:
        VocabularyMismatchError: the text of a token depends on the tokens around it.
    """
    names = tokenizer.vocabulary()
    bytes_of = _table(tokenizer, names)
    _require_plain(tokenizer, bytes_of)
    special = tokenizer.special_ids
    probe = next((i for i, data in enumerate(bytes_of) if data and data.startswith(SPACE) and data.strip()), None)
    stripped = probe is not None and tokenizer.decode([probe], True).encode() == (bytes_of[probe] or b"")[1:]
    mute = {tokenizer.bos_token_id, *tokenizer.ignored_ids} - {tokenizer.eos_token_id, None}
    return Lexicon(
        name=tokenizer.name,
        bytes_of=tuple(bytes_of),
        byte_ids=frozenset(i for i, name in enumerate(names) if byte_of_name(name) is not None),
        specials={names[i]: i for i in sorted(special) if i < len(names)},
        encode=tokenizer.encode_literally,
        start=tuple(tokenizer.start_ids),
        eos_id=tokenizer.eos_token_id,
        bos_id=tokenizer.bos_token_id,
        ignored_ids=frozenset(i for i in mute if i is not None),
        strips_first_space=stripped,
    )


def complete(data: bytes) -> bytes:
    """Return the bytes without an unfinished character at their end."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            wanted = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < wanted else data
        if byte < 0x80:
            break
    return data


def is_inside_character(data: bytes) -> bool:
    """Return whether these bytes begin in the middle of a character."""
    return bool(data) and 0x80 <= data[0] < 0xC0


def _parts(data: bytes) -> Iterator[str | bytes]:
    """Split bytes into valid text and the invalid bytes between."""
    while data:
        try:
            yield data.decode("utf-8")
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield data[: error.start].decode("utf-8")
            yield data[error.start : error.end]
            data = data[error.end :]


def _table(tokenizer: Tokenizer, names: Sequence[str]) -> list[bytes | None]:
    known, special = tokenizer.bytes_by_token(), tokenizer.special_ids
    if known is not None:
        return [known(name) if name and i not in special else None for i, name in enumerate(names)]
    anchor = next((i for i, name in enumerate(names) if len(name) == 1 and name.isascii() and name.isalpha()), None)
    if anchor is None:
        raise _unmappable(tokenizer, "it has no single-letter token that can precede others")
    before = tokenizer.decode([anchor], False)
    pairs = (tokenizer.decode([anchor, i], False) if i not in special else "" for i in range(len(names)))
    return [text[len(before) :].encode() if text.startswith(before) else None for text in pairs]


def _require_plain(tokenizer: Tokenizer, bytes_of: Sequence[bytes | None]) -> None:
    """Raise unless the joined bytes of random tokens equal their decoding."""
    whole = [i for i, data in enumerate(bytes_of) if data and all(isinstance(part, str) for part in _parts(data))]
    source = random.Random(0)
    for _ in range(NUM_CHECKS):
        ids = source.choices(whole, k=CHECK_LENGTH) if whole else []
        said = b"".join(bytes_of[i] or b"" for i in ids)
        if not said or tokenizer.decode(ids, True).lstrip(" ").encode() != said.lstrip(SPACE):
            raise _unmappable(tokenizer, "the text of its tokens depends on the tokens around them")


def _unmappable(tokenizer: Tokenizer, reason: str) -> VocabularyMismatchError:
    return VocabularyMismatchError(
        f"The vocabulary of {tokenizer.name} cannot be mapped to another one: {reason}. Choose a drafter that was "
        "trained with the same tokenizer, or one that needs no model, such as ngram."
    )
