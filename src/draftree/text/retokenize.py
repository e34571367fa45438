"""Translation of tokens between two tokenizers.

A lexicon is a tokenizer as a table of bytes. Vocabularies are compared by id. Texts are translated by the tokens that
two vocabularies share, or read again by the other tokenizer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from draftree.core.errors import VocabularyMismatchError
from draftree.text.streams import byte_of_name
from draftree.text.tokenizer import Tokenizer

SPACE = b" "
NUM_CHECKS, CHECK_LENGTH = 16, 64
"""Random rows of tokens whose decoding is compared with the table when a lexicon is built."""


@dataclass(frozen=True)
class Lexicon:
    """The properties of a tokenizer that are needed to translate text into or out of it.

    The only thing that two tokenizers share is the text. Text is bytes here, not characters, since a token may end
    inside a character.
    """

    name: str  # name of the tokenizer, for error messages
    # bytes of each id inside a text; None for special tokens and ids without a token
    bytes_of: tuple[bytes | None, ...]
    byte_ids: frozenset[int]  # ids of single bytes by name (<0xE6>), the last resort of tokenizers that have them
    specials: Mapping[str, int]  # ids of special tokens by their written form
    encode: Callable[[str], list[int]]  # text to ids, without added tokens, special tokens in it spelled
    start: tuple[int, ...]  # ids that the tokenizer adds before a text
    eos_id: int | None  # end-of-text token; None if the tokenizer has none
    bos_id: int | None  # begin-of-text token; None if the tokenizer has none
    ignored_ids: frozenset[int]  # special tokens without text: padding, unknown, begin of text
    strips_first_space: bool  # whether decoding drops the first space of a text

    @cached_property
    def ids_of(self) -> dict[bytes, int]:
        """Ids by their bytes; among several, one that is not a named byte, then the lowest."""
        ids: dict[bytes, int] = {}
        for token_id, data in enumerate(self.bytes_of):
            if data and (data not in ids or (ids[data] in self.byte_ids and token_id not in self.byte_ids)):
                ids[data] = token_id
        return ids

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

        `begins`: whether a text begins here: many tokenizers add a space there, which does not belong inside a text.
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
    """Build the table of a tokenizer."""
    names = tokenizer.vocabulary()
    bytes_of = _table(tokenizer, names)
    _require_plain(tokenizer, bytes_of)
    special = tokenizer.special_ids
    probe = next((i for i, data in enumerate(bytes_of) if data and data.startswith(SPACE) and data.strip()), None)
    stripped = probe is not None and tokenizer.decode([probe], True).encode() == (bytes_of[probe] or b"")[1:]
    mute = (tokenizer.ignored_ids | {tokenizer.bos_token_id}) - {tokenizer.eos_token_id}
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


# Incremental re-encoding of one tokenizer's growing text by another tokenizer.
#
# The last tokens of an encoding are provisional: "straw" is one until "berry" follows. New text is encoded together
# with a window of the tokens before it, and the new encoding takes over where both end the same token at the same byte.
# So the tokens always stand for the exact text, split as the tokenizer would split it.

CONTEXT_TOKENS = 12  # tokens that are encoded again with new text; more if the two encodings do not meet


class Rereading:
    """One text in the tokens of `lexicon`."""

    def __init__(self, source: Lexicon, lexicon: Lexicon, specials: Mapping[int, bytes | tuple[int, ...]]) -> None:
        self._source = source
        self._own = lexicon
        self._specials = specials
        self._run = bytearray()  # the text since the last special token
        self._run_start = len(lexicon.start)
        self._strips = source.strips_first_space
        self.tokens = list(lexicon.start)

    def push(self, ids: Iterable[int]) -> int:
        """Append tokens of the source. Returns how many of the previous tokens are unchanged."""
        stands = len(self.tokens)
        text = bytearray()
        for token_id in ids:
            said = self._source.token_bytes(token_id)
            meant = self._specials.get(token_id, ()) if said is None else said
            if isinstance(meant, bytes):
                text += self._stripped(meant)
            elif meant:
                stands = min(stands, self._add(bytes(text)))
                text.clear()
                self.tokens += meant
                self._run_start = len(self.tokens)
                self._run.clear()
        return min(stands, self._add(bytes(text)))

    def _stripped(self, data: bytes) -> bytes:
        if self._strips and data:
            self._strips = False
            return data.removeprefix(SPACE)
        return data

    def _add(self, data: bytes) -> int:
        if not data:
            return len(self.tokens)
        self._run += data
        width = CONTEXT_TOKENS
        while (first := self._window_start(width)) > self._run_start:
            met = self._meet(first, len(data))
            if met is not None:
                return self._replace(*met)
            width *= 4
        return self._replace(self._run_start, self._own.read(bytes(self._run), begins=True))

    def _window_start(self, width: int) -> int:
        first = max(self._run_start, len(self.tokens) - width)
        while first > self._run_start and is_inside_character(self._own.token_bytes(self.tokens[first]) or b""):
            first -= 1
        return first

    def _meet(self, first: int, num_new: int) -> tuple[int, list[int]] | None:
        """Find where the old tokens and a new encoding end the same token; returns that place and the new rest."""
        old = self.tokens[first:]
        size = len(self._own.text_of(old)) + num_new
        window = bytes(self._run[-size:])
        new = self._own.read(window, begins=False)
        if self._own.text_of(new) != window:
            return None  # the tokenizer does not preserve its input
        ends = accumulate(len(self._own.token_bytes(token_id) or b"") for token_id in new)
        cut = {place: number for number, place in enumerate(ends)}
        ends = accumulate(len(self._own.token_bytes(token_id) or b"") for token_id in old)
        for number, place in enumerate(ends):
            there = cut.get(place)
            if there is not None and new[there] == old[number]:
                return first + number + 1, new[there + 1 :]
        return None

    def _replace(self, first: int, new: list[int]) -> int:
        """Replace the tokens from `first` on by `new`; returns how many tokens did not change."""
        old = self.tokens[first:]
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        self.tokens[first + same :] = new[same:]
        return first + same


# Sources: intersection of vocabularies: Timor et al., arXiv 2502.05202, algorithm 4 (token-level intersection); drafts
# as strings: the same, algorithm 2 (string-level exact match).


@dataclass(frozen=True, slots=True)
class CommonTokens:
    """Tokens that two vocabularies share: equal bytes, or the same special token."""

    target_ids: tuple[int, ...]  # the target's ids, ascending, one to one with `draft_ids`
    draft_ids: tuple[int, ...]  # the drafter's ids of the same tokens
    draft_share: float  # share of the drafter's tokens that are common
    target_share: float  # share of the target's tokens that are common

    def __len__(self) -> int:
        return len(self.target_ids)


def common_tokens(target: Lexicon, draft: Lexicon, *, target_size: int, draft_size: int) -> CommonTokens:
    """Return the intersection of two vocabularies; ids beyond the widths of the models' logits are left out."""
    pairs = {target.ids_of[data]: i for data, i in draft.ids_of.items() if data in target.ids_of}
    pairs |= {target.specials[name]: i for name, i in draft.specials.items() if name in target.specials}
    if target.eos_id is not None and draft.eos_id is not None:
        # the end-of-text tokens correspond; neither may also map to another token
        pairs = {t: d for t, d in pairs.items() if t != target.eos_id and d != draft.eos_id}
        pairs[target.eos_id] = draft.eos_id
    kept = sorted((t, d) for t, d in pairs.items() if t < target_size and d < draft_size)
    return CommonTokens(
        tuple(t for t, _ in kept),
        tuple(d for _, d in kept),
        len(kept) / max(1, len(draft.ids_of) + len(draft.specials)),
        len(kept) / max(1, len(target.ids_of) + len(target.specials)),
    )


def read_specials(target: Lexicon, draft: Lexicon) -> Mapping[int, bytes | tuple[int, ...]]:
    """Return the drafter's input for each special token of the target: bytes, or ids of the drafter.

    The end-of-text token maps to the drafter's; a token of the same name maps to itself; padding and the begin-of-text
    token map to nothing; any other special token is read as its written form.
    """
    meant: dict[int, bytes | tuple[int, ...]] = {}
    for name, token_id in target.specials.items():
        if token_id == target.eos_id and draft.eos_id is not None:
            meant[token_id] = (draft.eos_id,)
        elif token_id in target.ignored_ids:
            meant[token_id] = ()
        else:
            meant[token_id] = (draft.specials[name],) if name in draft.specials else name.encode("utf-8")
    return meant


def encode_continuation(lexicon: Lexicon, before: Sequence[int], data: bytes) -> list[int]:
    """Return ids of the bytes `data` after other ids, split as the tokenizer splits the whole text if possible.

    The ids in `before` are fixed, so a new token must begin where they end. If the tokenizer would have a token across
    that place, the bytes up to the end of that token are spelled. An unfinished character at the end is left out.
    """
    context = _context(lexicon, before)
    data = complete(context + data)[len(context) :]
    ids = lexicon.read(context + data, begins=False)
    if lexicon.text_of(ids) != context + data:
        return lexicon.spell(data)
    place = first = 0
    while place < len(context) and first < len(ids):
        place += len(lexicon.token_bytes(ids[first]) or b"")
        first += 1
    return lexicon.spell(data[: place - len(context)]) + ids[first:]


def _context(lexicon: Lexicon, before: Sequence[int]) -> bytes:
    """Return the bytes of the last tokens after any special token, from the beginning of a character on."""
    first = len(before)
    while first and len(before) - first < CONTEXT_TOKENS and lexicon.token_bytes(before[first - 1]) is not None:
        first -= 1
    context = lexicon.text_of(before[first:])
    while is_inside_character(context):
        context = context[1:]
    return context


NUM_DIFFERENCES = 5
PADDING_NAME = re.compile(
    r"[<\[]\|?_?(pad|padding|unused|reserved|dummy|placeholder|extra)(_?special)?(_?(token|id))?[_ -]?\d*_?\|?[>\]]",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """An id with different tokens in two vocabularies; None for a vocabulary without this id."""

    token_id: int
    target: str | None
    draft: str | None

    def __str__(self) -> str:
        return f"{self.token_id} ({_shown(self.target)} / {_shown(self.draft)})"


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    same: bool  # every id below both sizes has the same token, and ids beyond are padding
    first_differences: tuple[TokenDifference, ...]  # the first differing ids, at most five
    target_size: int  # number of ids of the target
    draft_size: int  # number of ids of the drafter

    @property
    def common_size(self) -> int:
        """The number of ids that both have; the drafter's distributions are truncated to it."""
        return min(self.target_size, self.draft_size)


def compare_vocabularies(target: Sequence[str], draft: Sequence[str]) -> VocabularyComparison:
    """Compare two vocabularies token by token; each is given as the written form of every token by id.

    Models often round the number of their ids up. So ids that only the larger vocabulary has are not a difference if
    they are padding: without a token ("") or with a name like <pad>, [PAD7], <unused3>, <|reserved_special_token_0|>.
    """
    size = min(len(target), len(draft))
    differing = [] if list(target[:size]) == list(draft[:size]) else [i for i in range(size) if target[i] != draft[i]]
    differences = [TokenDifference(i, target[i] or None, draft[i] or None) for i in differing]
    differences += [TokenDifference(i, target[i], None) for i in range(size, len(target)) if not _is_padding(target[i])]
    differences += [TokenDifference(i, None, draft[i]) for i in range(size, len(draft)) if not _is_padding(draft[i])]
    return VocabularyComparison(not differences, tuple(differences[:NUM_DIFFERENCES]), len(target), len(draft))


def _is_padding(token: str) -> bool:
    return not token or PADDING_NAME.fullmatch(token) is not None


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def pieces_of(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """Return a function from a token id to its text inside a text.

    Bytes that form no character become U+FFFD. A token without bytes of its own is written as its name in the
    vocabulary, and without a tokenizer as its id in brackets.
    """
    if tokenizer is None:
        return "[{}]".format
    names = tokenizer.vocabulary()
    try:
        table = lexicon_of(tokenizer).bytes_of
    except VocabularyMismatchError:  # bytes depend on the tokens around
        table = ()

    def piece(token: int) -> str:
        data = table[token] if 0 <= token < len(table) else None
        if data is not None:
            return data.decode("utf-8", errors="replace")
        return (names[token] if 0 <= token < len(names) else "") or f"[{token}]"

    return piece
