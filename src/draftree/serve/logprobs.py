"""Strings and bytes of single tokens, and log-probabilities in the APIs' forms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final

from draftree.core.errors import VocabularyMismatchError
from draftree.engine.sequence import TokenLogprob
from draftree.text.detokenize import Detokenizer
from draftree.text.retokenize import lexicon_of
from draftree.text.streams import BROKEN
from draftree.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have


@final
class TokenTexts:
    """The written form of each token of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._names: list[str] = [] if tokenizer is None else tokenizer.vocabulary()
        self._bytes: tuple[bytes | None, ...] = ()
        if tokenizer is not None:
            try:
                self._bytes = lexicon_of(tokenizer).bytes_of
            except VocabularyMismatchError:
                # bytes depend on the tokens around: the written form stands for them
                self._bytes = ()

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token inside a text; of a special token its name."""
        data = self._bytes[token_id] if token_id < len(self._bytes) else None
        name = self._names[token_id] if token_id < len(self._names) else ""
        return (name or f"token_id:{token_id}").encode("utf-8") if data is None else data

    def text_of(self, token_id: int) -> str:
        """Return the text of a token; bytes that form no character become U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")


@lru_cache(maxsize=16)
def token_texts(tokenizer: Tokenizer | None) -> TokenTexts:
    return TokenTexts(tokenizer)


def chat_logprobs(entries: Sequence[TokenLogprob], texts: TokenTexts) -> list[dict[str, Any]]:
    """Return the entries of `logprobs.content` of a chat completion."""
    return [
        {
            **_chat_entry(entry.token_id, entry.logprob, texts),
            "top_logprobs": [_chat_entry(token, logprob, texts) for token, logprob in entry.top],
        }
        for entry in entries
    ]


def _chat_entry(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    data = texts.bytes_of(token_id)
    return {"token": data.decode("utf-8", errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


def prompt_logprobs_json(entries: tuple[TokenLogprob | None, ...], texts: TokenTexts) -> list[Any]:
    """Return `prompt_logprobs` as vLLM writes it: by token id, None for the first token."""
    return [None if entry is None else _ranked(entry, texts) for entry in entries]


def _ranked(entry: TokenLogprob, texts: TokenTexts) -> dict[str, Any]:
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
    rows = {entry.token_id: entry.logprob, **dict(entry.top)}
    return {
        str(token): {
            "logprob": finite(logprob),
            "rank": entry.rank if token == entry.token_id else ranks[token],
            "decoded_token": texts.text_of(token),
        }
        for token, logprob in rows.items()
    }


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


@final
class TokenStarts:
    """Where each token begins in the text of its sequence. Mutated by `push`.

    Bytes that turn out to form no character are as many characters as bytes; of those in earlier calls the start was
    already returned as if they formed one.
    """

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self.text = ""
        self._detokenizer = detokenizer
        self._held: list[int | None] = []
        """The places, in the current call, of tokens whose text is held back; None for those of earlier calls."""

    def push(self, ids: Sequence[int], *, is_last: bool) -> list[int]:
        detokenizer = self._detokenizer
        if detokenizer is None:
            return [0] * len(ids)
        starts: list[int] = []
        self._held = [None] * len(self._held)
        for place, token_id in enumerate(ids):
            starts.append(len(self.text) + detokenizer.num_held_before(token_id))
            piece = detokenizer.push(token_id)
            self._read(piece, starts)
            if not piece and not detokenizer.skips(token_id):
                self._held.append(place)
        if is_last:
            self._read(detokenizer.finish(), starts)
        return starts

    def _read(self, piece: str, starts: list[int]) -> None:
        if piece and piece.startswith(BROKEN * len(self._held)):
            for number, place in enumerate(self._held):
                if place is not None:
                    starts[place] = len(self.text) + number
        if piece:
            self._held = []
        self.text += piece


@final
class OffsetLogprobs:
    """Log-probabilities of one plain completion with offsets into its text."""

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool, prompt_ids: Sequence[int]) -> None:
        self._texts = texts
        tokenizer = texts.tokenizer
        detokenizer = None
        if tokenizer is not None:
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
        self._starts = TokenStarts(detokenizer)
        self._echoed: tuple[Sequence[TokenLogprob | None], tuple[int, ...], list[int]] = ((), (), [])

    def begin(self, entries: Sequence[TokenLogprob | None], ids: tuple[int, ...], text: str) -> None:
        """Let the next result begin with an echoed prompt, without special tokens that the tokenizer added."""
        self._echoed = (entries, ids, _prompt_offsets(self._texts.tokenizer, ids, text))
        self._starts.text = text

    def push(self, entries: Sequence[TokenLogprob | None], ids: tuple[int, ...], *, is_last: bool) -> dict[str, Any]:
        """Return the `logprobs` object of the next tokens; the entry of a token without a prediction is None."""
        first, before, offsets = self._echoed
        self._echoed = ((), (), [])
        offsets += self._starts.push(ids, is_last=is_last)
        entries, ids, texts = (*first, *entries), (*before, *ids), self._texts
        return {
            "tokens": [texts.text_of(token_id) for token_id in ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        # as in OpenAI's API, the chosen token is listed even if it is not among the most likely
        rows = (*entry.top, (entry.token_id, entry.logprob))
        return {self._texts.text_of(token): finite(logprob) for token, logprob in rows}


def _prompt_offsets(tokenizer: Tokenizer | None, ids: Sequence[int], text: str) -> list[int]:
    """Return where each token of a prompt begins in its text; tokens that were added around it have no characters."""
    if tokenizer is None:
        return [0] * len(ids)
    whole = TokenStarts(Detokenizer(tokenizer, skip_special_tokens=False))
    starts = whole.push(ids, is_last=True)
    added = max(0, whole.text.find(text))
    return [min(max(0, start - added), len(text)) for start in starts]
