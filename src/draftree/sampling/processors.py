"""Interface of controls that depend on the tokens before a row, and the view of those tokens.

A row is a node of a tree: its history is the written tokens and the drafted ones on the path from the root to
it. A processor must give a node exactly the logits that plain decoding would have once that path is written.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.sampling.history import History

NO_TOKEN = -1
"""Placeholder in `RowContext.tails` for a missing token; equal to no token id."""


class Processor(ABC):
    """One control over rows of logits."""

    @abstractmethod
    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Return the logits under this control.

        Args:
            logits: shape (rows, vocab), finite or -inf; may be changed in place, the caller hands over a copy.
            context: the tokens before each row.

        Returns:
            Same shape and dtype; perhaps the same tensor.
        """


class Ban(Processor):
    """A control that forbids some tokens and leaves all other logits as they are."""

    __slots__ = ()

    @abstractmethod
    def places(self, context: RowContext) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and tokens that are forbidden, both int64 of shape (places,); a place may occur twice."""

    @final
    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Set the logits of these tokens to -inf."""
        return forbid(logits, *self.places(context))


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The number of occurrences of tokens before each row.

    The history is shared by all rows, so its tokens are counted once. The tokens of a row's own path are
    corrections, which replace the shared count.

    Attributes:
        tokens: the history's different tokens, ascending, shape (tokens,).
        counts: how often each occurs in the history, shape (tokens,).
        path_rows: rows of the corrections, shape (corrections,).
        path_tokens: tokens of the corrections; a pair of row and token occurs once.
        path_counts: occurrences of that token in history and path together.
    """

    tokens: np.ndarray
    counts: np.ndarray
    path_rows: np.ndarray
    path_tokens: np.ndarray
    path_counts: np.ndarray

    def places(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and tokens of all that occur before each of `num_rows` rows."""
        rows = np.repeat(np.arange(num_rows), len(self.tokens))
        tokens = np.tile(self.tokens, num_rows)
        return np.concatenate((rows, self.path_rows)), np.concatenate((tokens, self.path_tokens))

    def update(self, logits: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Change the logits of these tokens in place.

        Args:
            logits: shape (rows, vocab).
            change: new values from old ones and counts (in the logits' dtype); the shapes broadcast.
        """
        end = int(np.searchsorted(self.tokens, logits.shape[-1]))
        inside = self.path_tokens < logits.shape[-1]
        rows = _on(self.path_rows[inside], logits)
        tokens = _on(self.path_tokens[inside], logits)
        corrected = change(logits[rows, tokens], _on(self.path_counts[inside], logits).to(logits.dtype))
        shared = _on(self.tokens[:end], logits)
        counts = _on(self.counts[:end], logits).to(logits.dtype)
        logits.index_copy_(1, shared, change(logits.index_select(1, shared), counts))
        logits[rows, tokens] = corrected
        return logits


class RowContext:
    """The tokens before each row of one sequence. Derived values are computed on first use.

    Args:
        history: the written tokens.
        paths: for each row the drafted tokens from the root to its node; empty for the root itself.
        device: device of the logits.
    """

    def __init__(self, history: History, paths: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> None:
        self.history = history
        self.paths = paths
        self.device = torch.device(device)

    def tails(self, width: int, *, start: int = 0) -> np.ndarray:
        """Return the last tokens before each row, int64 of shape (rows, width), right-aligned, padded by `NO_TOKEN`.

        Args:
            width: number of columns.
            start: written tokens before this one are left out.
        """
        found = np.full((len(self.paths), width), NO_TOKEN, dtype=np.int64)
        written = self.history.tokens[start:]
        for row, path in enumerate(self.paths):
            drafted = min(len(path), width)
            room = min(width - drafted, len(written))
            found[row, width - drafted :] = path[len(path) - drafted :]
            found[row, width - drafted - room : width - drafted] = written[len(written) - room :]
        return found

    @property
    def num_output_tokens(self) -> np.ndarray:
        """Number of tokens after the prompt before each row, shape (rows,)."""
        return self.history.num_output_tokens + np.fromiter(map(len, self.paths), np.int64, len(self.paths))

    @cached_property
    def all_counts(self) -> TokenCounts:
        """Counts of prompt, output and path tokens."""
        return _counted(self.history.tokens, self.paths)

    @cached_property
    def output_counts(self) -> TokenCounts:
        """Counts of output and path tokens."""
        return _counted(self.history.output, self.paths)


def forbid(logits: Tensor, rows: np.ndarray, tokens: np.ndarray) -> Tensor:
    """Set logits[rows[i], tokens[i]] to -inf, in place.

    Args:
        logits: shape (rows, vocab).
        rows: int64, shape (n,).
        tokens: int64, shape (n,); tokens beyond the logits' width are ignored.
    """
    logits[places_on(logits, rows, tokens)] = -math.inf
    return logits


def places_on(logits: Tensor, rows: np.ndarray, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return rows and tokens, both int64 of shape (n,), as indices into `logits`, without tokens beyond its width."""
    inside = tokens < logits.shape[-1]
    return _on(rows[inside], logits), _on(tokens[inside], logits)


def _on(values: np.ndarray, logits: Tensor) -> Tensor:
    return torch.from_numpy(values).to(logits.device, non_blocking=True)


def _counted(written: np.ndarray, paths: Sequence[Sequence[int]]) -> TokenCounts:
    # with counts numpy sorts; without them it uses a hash table, ten times slower here
    tokens, counts = np.unique(written, return_counts=True)
    drafted = np.array([token for path in paths for token in path], dtype=np.int64)
    if not len(drafted):
        return TokenCounts(tokens, counts, drafted, drafted, drafted)
    rows = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
    span = int(drafted.max()) + 1
    pairs, path_counts = np.unique(rows * span + drafted, return_counts=True)
    path_rows, path_tokens = np.divmod(pairs, span)
    if len(tokens):
        place = np.minimum(np.searchsorted(tokens, path_tokens), len(tokens) - 1)
        path_counts += np.where(tokens[place] == path_tokens, counts[place], 0)
    return TokenCounts(tokens, counts, path_rows, path_tokens, path_counts)
