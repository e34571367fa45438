"""The tokens that two vocabularies share, and translation of text between them.

Sources: intersection of vocabularies: Timor et al., arXiv 2502.05202, algorithm 4 (token-level intersection); drafts
as strings: the same, algorithm 2 (string-level exact match).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftree.text.retokenize.lexicon import Lexicon, complete, is_inside_character

CONTEXT_TOKENS = 12
"""Tokens before a draft that are encoded together with it."""


@dataclass(frozen=True, slots=True)
class CommonTokens:
    """Tokens that two vocabularies share: equal bytes, or the same special token.

    Attributes:
        target_ids: the target's ids, ascending, one to one with `draft_ids`.
        draft_ids: the drafter's ids of the same tokens.
        draft_share: share of the drafter's tokens that are common.
        target_share: share of the target's tokens that are common.
    """

    target_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    draft_share: float
    target_share: float

    def __len__(self) -> int:
        return len(self.target_ids)


def common_tokens(target: Lexicon, draft: Lexicon, *, target_size: int, draft_size: int) -> CommonTokens:
    """Return the intersection of two vocabularies.

    Args:
        target: the target's lexicon.
        draft: the drafter's lexicon.
        target_size: width of the target's logits; larger ids are left out.
        draft_size: width of the drafter's logits; larger ids are left out.
    """
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
