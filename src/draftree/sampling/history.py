"""The tokens of one sequence, prompt and output, in one growable array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A position is found by a hash of the n-1 tokens before it and is then compared token by token, so that a collision of
# hashes never adds a token. Old positions are sorted by hash; the newest wait unsorted, so that an append stays cheap.

_MULTIPLIER = 0x9E3779B97F4A7C15
_NUM_HASHED = 8  # tokens that a hash covers, the newest ones; the others are compared only
_NUM_UNSORTED = 128  # unsorted positions before they are merged into the sorted ones: each lookup compares all of them


class NgramIndex:
    """Followers of the (n-1)-grams of a growing text, for n = `size` >= 2; hashes are polynomials over uint64."""

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
        """Index the new positions of the whole text, int64 of shape (tokens,), which began as before."""
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
        """Return the tokens that followed some (n-1)-grams, int64 of shape (rows, size - 1).

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


class History:
    """The tokens written so far. Only the engine appends; drafters and processors read.

    Args:
        capacity: initial capacity in tokens; the array doubles when it is full.
    """

    __slots__ = ("_buffer", "_indexes", "_length", "_numbers", "capacity", "prompt_length")

    def __init__(self, prompt: Sequence[int], *, capacity: int = 0) -> None:
        self.prompt_length = len(prompt)
        self.capacity = capacity
        self._buffer = np.empty(max(capacity, len(prompt), 16), dtype=np.int64)
        self._buffer[: len(prompt)] = prompt
        self._length = len(prompt)
        self._indexes: dict[tuple[int, int], NgramIndex] = {}
        # a memoryview of the same numbers: cheaper than numpy, whose code the pass evicts from the CPU caches
        self._numbers = self._buffer.data

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, int64 of shape (tokens,): a view, valid until the next append."""
        return self._buffer[: self._length]

    @property
    def output(self) -> np.ndarray:
        """Tokens after the prompt: a view, valid until the next append."""
        return self._buffer[self.prompt_length : self._length]

    @property
    def num_output_tokens(self) -> int:
        return self._length - self.prompt_length

    def since(self, start: int) -> list[int]:
        """Return the tokens from index `start` on, as a new list."""
        tokens: list[int] = self._numbers[start : self._length].tolist()
        return tokens

    def ngrams(self, size: int, start: int = 0) -> NgramIndex:
        """Return the index of the n-grams of `tokens[start:]`, up to date; it is kept for the next call."""
        index = self._indexes.get((size, start))
        if index is None:
            index = self._indexes[size, start] = NgramIndex(size)
        index.extend(self.tokens[start:])
        return index

    def append(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._numbers):
            grown = np.empty(max(2 * len(self._buffer), end), dtype=np.int64)
            grown[: self._length] = self.tokens
            self._buffer, self._numbers = grown, grown.data
        for place, token in enumerate(tokens, self._length):
            self._numbers[place] = token
        self._length = end
