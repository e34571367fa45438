"""What two vocabularies have in common, and how text that one of them cuts is said in the other.

Sources: intersection of vocabularies: Timor et al., arXiv 2502.05202, algorithm 4 (token-level intersection); drafts
as strings: the same, algorithm 2 (string-level exact match).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftree.text.retokenize.lexicon import Lexicon, complete, is_inside_character

LOOK_BEHIND = 12
"""Tokens before a draft that take part in cutting it."""


@dataclass(frozen=True, slots=True)
class CommonTokens:
    """Tokens that two vocabularies share: they say the same bytes, or are the same special token.

    Attributes:
        target_ids: one to one with `draft_ids`, ascending.
        draft_ids: the drafter's ids of the same tokens.
        draft_share: of the drafter's tokens.
        target_share: of the target's tokens.
    """

    target_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    draft_share: float
    target_share: float

    def __len__(self) -> int:
        return len(self.target_ids)


def common_tokens(target: Lexicon, draft: Lexicon, *, target_size: int, draft_size: int) -> CommonTokens:
    """The intersection of two vocabularies.

    Args:
        target: the target's.
        draft: the drafter's.
        target_size: width of the target's logits; ids beyond are left out.
        draft_size: width of the drafter's logits.
    """
    pairs = {target.ids_of[data]: i for data, i in draft.ids_of.items() if data in target.ids_of}
    pairs |= {target.specials[name]: i for name, i in draft.specials.items() if name in target.specials}
    if target.eos_id is not None and draft.eos_id is not None:
        # two names of one thing; none of them may mean another token as well
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
    """What a drafter reads where the target's text has a special token: bytes, or ids of its own.

    The end of a text is the end of a text; a token of the same name is itself; padding and the begin of a text say
    nothing; any other marker is read as it is written.
    """
    found: dict[int, bytes | tuple[int, ...]] = {}
    for name, token_id in target.specials.items():
        if token_id == target.eos_id and draft.eos_id is not None:
            found[token_id] = (draft.eos_id,)
        elif token_id in target.ignored_ids:
            found[token_id] = ()
        elif name in draft.specials:
            found[token_id] = (draft.specials[name],)
        else:
            found[token_id] = name.encode("utf-8")
    return found


def encode_continuation(lexicon: Lexicon, before: Sequence[int], data: bytes) -> list[int]:
    """Ids that say these bytes behind other ids, cut as the tokenizer cuts the whole where it can.

    What is written stays as it was cut, so a new token must begin where it ends. Where the tokenizer would have cut
    across that place, the bytes up to its next cut are spelled. An unfinished character at the end is left out.
    """
    context = _context(lexicon, before)
    data = complete(context + data)[len(context) :]
    ids = lexicon.read(context + data, begins=False)
    if lexicon.text_of(ids) != context + data:
        return lexicon.spell(data)
    place = first = 0
    while place < len(context) and first < len(ids):
        place += len(lexicon.says(ids[first]) or b"")
        first += 1
    return lexicon.spell(data[: place - len(context)]) + ids[first:]


def _context(lexicon: Lexicon, before: Sequence[int]) -> bytes:
    """What the last tokens say, from the beginning of a character on, and not from before a special token."""
    first = len(before)
    while first and len(before) - first < LOOK_BEHIND and lexicon.says(before[first - 1]) is not None:
        first -= 1
    context = lexicon.text_of(before[first:])
    while is_inside_character(context):
        context = context[1:]
    return context
