"""Index of the n-grams of a growing text: which tokens followed a given run of n-1 tokens.

A position is found by a hash of the n-1 tokens before it and is then compared token by token, so that a collision of
hashes never adds a token. Old positions are sorted by hash; the newest wait unsorted, so that an append stays cheap.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIER = 0x9E3779B97F4A7C15
_NUM_HASHED = 8
"""Tokens that a hash covers, the newest ones; the others are compared only."""
_NUM_UNSORTED = 128
"""Unsorted positions before they are merged into the sorted ones: each lookup compares all of them."""


class NgramIndex:
    """Followers of the (n-1)-grams of a text.

    Args:
        size: tokens of an n-gram, at least 2.
        multiplier: of the polynomial hash over uint64.
    """

    __slots__ = ("_ends", "_keys", "_multiplier", "_num_sorted", "_places", "_sorted", "size")

    def __init__(self, size: int, *, multiplier: int = _MULTIPLIER) -> None:
        assert size >= 2, "a 1-gram has no context"
        self.size = size
        self._multiplier = np.uint64(multiplier)
        self._keys = np.empty(0, dtype=np.uint64)  # of every indexed position, in text order
        self._num_sorted = 0
        self._sorted = np.empty(0, dtype=np.uint64)
        self._places = np.empty(0, dtype=np.int64)  # position in text order of each sorted key
        self._ends = 0

    def extend(self, tokens: np.ndarray) -> None:
        """Index the new positions of a text.

        Args:
            tokens: the whole text, int64 of shape (tokens,); what was given before must be its beginning.
        """
        first, last = self._ends, len(tokens) - self.size + 1
        if last <= first:
            return
        windows = np.lib.stride_tricks.sliding_window_view(tokens[first : len(tokens) - 1], self.size - 1)
        if last > len(self._keys):
            grown = np.empty(max(2 * len(self._keys), last), dtype=np.uint64)
            grown[:first] = self._keys[:first]
            self._keys = grown
        self._keys[first:last] = self._hashed(windows)
        self._ends = last
        if last - self._num_sorted > _NUM_UNSORTED:
            self._merge()

    def followers(self, tokens: np.ndarray, contexts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that followed some (n-1)-grams.

        Args:
            tokens: the text that was indexed, or a longer one.
            contexts: int64 of shape (rows, size - 1).

        Returns:
            Rows and tokens of all pairs, both int64 of shape (pairs,); a pair may occur several times.
        """
        keys = self._hashed(contexts)
        low = np.searchsorted(self._sorted, keys)
        counts = np.searchsorted(self._sorted, keys, side="right") - low
        sorted_rows = np.repeat(np.arange(len(keys)), counts)
        offsets = np.arange(len(sorted_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        new_rows, new = np.nonzero(keys[:, None] == self._keys[self._num_sorted : self._ends])
        rows = np.concatenate((sorted_rows, new_rows))
        starts = np.concatenate((self._places[np.repeat(low, counts) + offsets], new + self._num_sorted))
        for column in range(self.size - 1):
            if not len(rows):
                break
            fits = tokens[starts + column] == contexts[rows, column]
            rows, starts = rows[fits], starts[fits]
        return rows, tokens[starts + self.size - 1]

    def _hashed(self, windows: np.ndarray) -> np.ndarray:
        keys = np.zeros(len(windows), dtype=np.uint64)
        for column in range(max(0, self.size - 1 - _NUM_HASHED), self.size - 1):
            keys *= self._multiplier
            keys += windows[:, column].astype(np.uint64)
        return keys

    def _merge(self) -> None:
        new = self._keys[self._num_sorted : self._ends]
        order = np.argsort(new, kind="stable")
        places = np.searchsorted(self._sorted, new[order], side="right")
        self._sorted = np.insert(self._sorted, places, new[order])
        self._places = np.insert(self._places, places, order + self._num_sorted)
        self._num_sorted = self._ends
