"""The tokens of one sequence, prompt and output, in one growable array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftree.sampling.ngram_index import NgramIndex


class History:
    """The tokens written so far. Only the engine appends; drafters and processors read.

    Args:
        prompt: token ids of the prompt, at least one.
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
        """The number of tokens after the prompt."""
        return self._length - self.prompt_length

    def since(self, start: int) -> list[int]:
        """Return the tokens from index `start` on, as a new list."""
        found: list[int] = self._numbers[start : self._length].tolist()
        return found

    def ngrams(self, size: int, start: int = 0) -> NgramIndex:
        """Return the index of the n-grams of `tokens[start:]`, up to date; it is kept for the next call.

        Args:
            size: tokens of an n-gram, at least 2.
            start: first token that counts; the same in all calls for one index.
        """
        index = self._indexes.get((size, start))
        if index is None:
            index = self._indexes[size, start] = NgramIndex(size)
        index.extend(self.tokens[start:])
        return index

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        end = self._length + len(tokens)
        if end > len(self._numbers):
            grown = np.empty(max(2 * len(self._buffer), end), dtype=np.int64)
            grown[: self._length] = self.tokens
            self._buffer, self._numbers = grown, grown.data
        for place, token in enumerate(tokens, self._length):
            self._numbers[place] = token
        self._length = end
