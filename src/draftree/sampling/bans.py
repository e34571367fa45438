"""Processors that forbid tokens: an allow list, repeated n-grams, bad words, and an end of text before a minimum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftree.sampling.processors import NO_TOKEN, Processor, RowContext, forbid

_ANY_TOKEN = NO_TOKEN - 1


class AllowedTokens(Processor):
    """Forbids all tokens except the given ones.

    Args:
        tokens: token ids, at least one.
    """

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = torch.tensor(sorted(set(tokens)), dtype=torch.int64)

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Set the other logits to -inf."""
        tokens = self._tokens[self._tokens < logits.shape[-1]].to(logits.device)
        kept = logits.index_select(-1, tokens)
        return logits.fill_(-math.inf).index_copy_(-1, tokens, kept)


class NoRepeatNgram(Processor):
    """Forbids every token that would complete a repeated run of `size` tokens in prompt, output and path.

    Args:
        size: tokens in a run, at least 1.
    """

    __slots__ = ("_size",)

    def __init__(self, size: int) -> None:
        self._size = size

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Set the logits of such tokens to -inf."""
        if self._size == 1:
            return context.all_counts.update(logits, lambda values, _: torch.full_like(values, -math.inf))
        tokens = context.tokens
        if tokens.shape[1] < self._size:
            return logits
        rows, starts = self._repeats(tokens)
        return forbid(logits, rows, tokens[rows, starts + self._size - 1])

    def _repeats(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return row and first column of every run whose tokens but the last equal the row's newest tokens."""
        last = self._size - 1
        # One dense comparison, with the newest token; few places are left for the others. A row shorter than
        # a run has NO_TOKEN among its newest tokens: only its own end matches, and no token follows the end.
        newest = tokens[:, -last:]
        rows, starts = np.nonzero(tokens[:, last - 1 : -1] == newest[:, -1:])
        for column in range(last - 1):
            fits = tokens[rows, starts + column] == newest[rows, column]
            rows, starts = rows[fits], starts[fits]
        return rows, starts


class BadWords(Processor):
    """Forbids the last token of a word where prompt, output and path end with its other tokens.

    Args:
        words: token ids of each word, at least one.
    """

    __slots__ = ("_lasts", "_prefixes")

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, words))
        self._lasts = np.array([word[-1] for word in words], dtype=np.int64)
        self._prefixes = np.full((len(words), longest - 1), _ANY_TOKEN, dtype=np.int64)
        for row, word in enumerate(words):
            self._prefixes[row, longest - len(word) :] = word[:-1]

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Set the logits of such tokens to -inf."""
        tails = context.tails(self._prefixes.shape[1])[:, None]
        fits = (tails == self._prefixes) | (self._prefixes == _ANY_TOKEN)
        rows, words = np.nonzero(fits.all(axis=-1))
        return forbid(logits, rows, self._lasts[words])


class MinTokens(Processor):
    """Forbids the tokens that end the text before it has `least` tokens, path included.

    Args:
        least: minimum number of generated tokens before the end.
        stop_ids: the tokens that end the text.
    """

    __slots__ = ("_least", "_stop_ids")

    def __init__(self, least: int, stop_ids: Sequence[int]) -> None:
        self._least = least
        self._stop_ids = np.array(stop_ids, dtype=np.int64)

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Set the logits of these tokens to -inf in rows below the minimum."""
        early = np.flatnonzero(context.num_output_tokens < self._least)
        if not len(early):
            return logits
        return forbid(logits, np.repeat(early, len(self._stop_ids)), np.tile(self._stop_ids, len(early)))
