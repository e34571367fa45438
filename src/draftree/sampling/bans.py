"""Processors that forbid tokens: an allow list, repeated n-grams, bad words, and an end of text before a minimum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftree.sampling.processors import NO_TOKEN, Ban, Processor, RowContext

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


class NoRepeatNgram(Ban):
    """Forbids every token that would complete a repeated run of `size` tokens of a row's text, its path included.

    The written tokens are looked up in the history's index, which grows as they are written; the runs that end in a
    row's path are compared directly. At size 1 every token of the text is forbidden, also an end-of-text token.

    Args:
        size: tokens in a run, at least 1.
        includes_prompt: whether a row's text begins with the prompt, as in transformers, or after it, as in fairseq.
    """

    __slots__ = ("_includes_prompt", "_size")

    def __init__(self, size: int, *, includes_prompt: bool = True) -> None:
        self._size = size
        self._includes_prompt = includes_prompt

    def places(self, context: RowContext) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and tokens that would complete a repeated run."""
        if self._size == 1:
            counts = context.all_counts if self._includes_prompt else context.output_counts
            return counts.places(len(context.paths))
        last = self._size - 1
        history = context.history
        start = 0 if self._includes_prompt else history.prompt_length
        depth = max(map(len, context.paths), default=0)
        if len(history) - start + depth < self._size:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        recent = context.tails(last + depth, start=start)
        newest = recent[:, recent.shape[1] - last :]
        rows, tokens = history.ngrams(self._size, start).followers(history.tokens[start:], newest)
        # a shorter row has NO_TOKEN before its tokens: such a run ends at the row's own end, where no token follows
        found, starts = np.nonzero(recent[:, last - 1 : -1] == newest[:, -1:])
        for column in range(last):
            if not len(found):
                break
            fits = recent[found, starts + column] == newest[found, column]
            found, starts = found[fits], starts[fits]
        rows = np.concatenate((rows, found))
        tokens = np.concatenate((tokens, recent[found, starts + last]))
        is_token = tokens != NO_TOKEN
        return rows[is_token], tokens[is_token]


class BadWords(Ban):
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

    def places(self, context: RowContext) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and tokens that would complete a word."""
        tails = context.tails(self._prefixes.shape[1])[:, None]
        fits = (tails == self._prefixes) | (self._prefixes == _ANY_TOKEN)
        rows, words = np.nonzero(fits.all(axis=-1))
        return rows, self._lasts[words]


class MinTokens(Ban):
    """Forbids the tokens that end the text before it has `least` tokens, path included.

    Args:
        least: minimum number of generated tokens before the end.
        stop_ids: the tokens that end the text.
    """

    __slots__ = ("_least", "_stop_ids")

    def __init__(self, least: int, stop_ids: Sequence[int]) -> None:
        self._least = least
        self._stop_ids = np.array(stop_ids, dtype=np.int64)

    def places(self, context: RowContext) -> tuple[np.ndarray, np.ndarray]:
        """Return these tokens for all rows below the minimum."""
        early = np.flatnonzero(context.num_output_tokens < self._least)
        return np.repeat(early, len(self._stop_ids)), np.tile(self._stop_ids, len(early))
