"""Rows of logits as a pass returns them: opaque until a tensor is requested.

A search divides by the temperature, adds noise and ranks. Implementations round logarithms in their own ways. Where
two scores are so close that this could decide a pick, they are computed again in double precision, so that a pick is
the same for every implementation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple, final

import torch
from torch import Tensor

from draftree.core.noise import gumbel, gumbel_of_few
from draftree.core.tensors import on_host, to_device, to_host
from draftree.sampling.search import argmax, leading, log_total, read_pairs

RowNoise = Sequence[tuple[tuple[int, int], float] | None]
"""For each row the keys of its noise and its temperature; None for a row that is used as it is."""
NEAR = 1e-3
"""Scores this close to the largest are computed exactly; implementations are off by less than a tenth of it."""


class Picks(NamedTuple):
    """The pick of each row."""

    tokens: list[int]
    is_sound: list[bool]
    """Whether the row has a token to choose and no NaN."""


class Top(NamedTuple):
    """The largest scores of each row."""

    tokens: list[list[int]]
    """By descending score, of equals the first column first; a row that contains NaN starts with its column."""
    scores: list[list[float]]
    totals: list[float]
    """Logarithm of the row's sum of exponentials."""


class Logits(ABC):
    """Rows of logits. Reading them leaves them as they are; a caller may overwrite what `tensor` returns."""

    __slots__ = ()
    has_controls: ClassVar[bool] = False
    """Whether controls and noise are applied already: `picks` ignores the noise, and there is no tensor."""

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Columns of a row: tokens of the vocabulary."""

    @abstractmethod
    def tensor(self) -> Tensor:
        """The rows, shape (rows, width), float32 or float64; shares memory with these logits."""

    def columns(self) -> Tensor:
        """The computed columns, shape (rows, columns); a caller may change them in place, and so these logits."""
        return self.tensor()

    @abstractmethod
    def rows(self, start: int, stop: int) -> Logits:
        """Rows from `start` up to `stop`; a view."""

    @abstractmethod
    def narrowed(self, width: int) -> Logits:
        """The first columns; a view."""

    @abstractmethod
    def replaced(self, tensor: Tensor) -> Logits:
        """Logits with these values, shape (rows, width), searched by the same implementation."""

    @abstractmethod
    def picks(self, noise: RowNoise) -> Picks:
        """The largest entry of each row over its temperature plus noise, decided in double precision where close."""

    @abstractmethod
    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        """The `count` largest entries of each row over its temperature plus noise.

        Args:
            noise: for each row.
            count: entries of a row, at most its width.
            overwrites: these logits are not read again, and their memory may be used.
        """

    def computing(self) -> AbstractContextManager[object]:
        """A context for torch operations on the rows, which leaves the processors to the next pass at its end."""
        return nullcontext()


@final
class TensorLogits(Logits):
    """Logits in a tensor on any device.

    Args:
        tensor: shape (rows, width), float32 or float64.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @property
    def num_rows(self) -> int:
        """Rows."""
        return self._tensor.shape[0]

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self._tensor.shape[1]

    def tensor(self) -> Tensor:
        """The tensor itself."""
        return self._tensor

    def rows(self, start: int, stop: int) -> TensorLogits:
        """Some rows; a view."""
        return TensorLogits(self._tensor[start:stop])

    def narrowed(self, width: int) -> TensorLogits:
        """The first columns; a view."""
        return TensorLogits(self._tensor[:, :width])

    def replaced(self, tensor: Tensor) -> TensorLogits:
        """Logits in another tensor."""
        return TensorLogits(tensor)

    def picks(self, noise: RowNoise) -> Picks:
        """Picks with one transfer from the device; more only where scores are close."""
        if not noise:
            return Picks([], [])
        scores = perturbed(self._tensor, noise)
        best = torch.tensor(argmax(scores)) if on_host(scores) else scores.argmax(dim=-1)
        highest = scores.gather(-1, best[:, None])
        is_sound = highest[:, 0].isfinite()
        if not any(noise):
            picks, sound = to_host(torch.stack((best, is_sound.long())))
            return Picks(picks, [bool(flag) for flag in sound])
        num_near = (scores >= highest - NEAR).sum(dim=-1)
        picks, sound, near = to_host(torch.stack((best, is_sound.long(), num_near)))
        for row, entry in enumerate(noise):
            if entry is not None and sound[row] and near[row] > 1:
                tokens = to_host((scores[row] >= highest[row] - NEAR).nonzero()[:, 0])
                picks[row] = decided(tokens, to_host(self._tensor[row, tokens]), entry)
        return Picks(picks, [bool(flag) for flag in sound])

    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        """The largest entries by torch and numpy."""
        scores = perturbed(self._tensor, noise, overwrites=overwrites)
        tokens, values = leading(scores, count)
        return Top(*read_pairs(tokens, values), to_host(log_total(scores)[:, 0]))


def decided(tokens: Sequence[int], logits: Sequence[float], noise: tuple[tuple[int, int], float]) -> int:
    """The pick among a few tokens of one row, in double precision.

    Args:
        tokens: ascending.
        logits: of these tokens.
        noise: keys of the row's noise, and its temperature.
    """
    keys, temperature = noise
    pairs = zip(logits, gumbel_of_few(keys, tokens), strict=True)
    scores = [value / temperature + added for value, added in pairs]
    return tokens[max(range(len(tokens)), key=scores.__getitem__)]


def perturbed(logits: Tensor, noise: RowNoise, *, overwrites: bool = False, token_ids: Tensor | None = None) -> Tensor:
    """Logits over temperature, plus noise.

    Args:
        logits: shape (rows, width).
        noise: for each row.
        overwrites: `logits` may be used for the result.
        token_ids: the token of each column, int32, shape (width,); None if column i is token i.
    """
    noisy = [entry for entry in noise if entry is not None]
    if not noisy:
        return logits
    if len(noisy) < len(noise):
        scores = logits if overwrites else logits.clone()
        rows = to_device([row for row, entry in enumerate(noise) if entry is not None], logits.device)
        scores[rows] = perturbed(scores[rows], noisy, overwrites=True, token_ids=token_ids)
        return scores
    temperatures = [temperature for _, temperature in noisy]
    if set(temperatures) != {1.0}:
        divisor = to_device(temperatures, logits.device, dtype=logits.dtype)[:, None]
        logits, overwrites = logits.div_(divisor) if overwrites else logits / divisor, True
    if token_ids is None:
        token_ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    added = _noise_of_rows([keys for keys, _ in noisy], token_ids)
    if overwrites:
        return logits.add_(added)
    is_whole = added.dtype == logits.dtype and added.shape == logits.shape
    return added.add_(logits) if is_whole else logits + added


def _noise_of_rows(keys: Sequence[tuple[int, int]], token_ids: Tensor) -> Tensor:
    """Noise of every row, or one row for all; nodes of one depth have one position, whose noise is hashed once."""
    distinct = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    noise = gumbel(list(distinct), token_ids)
    if len(distinct) in (1, len(keys)):
        return noise
    return noise[to_device([distinct[key] for key in keys], token_ids.device)]


def is_close(scores: Sequence[float]) -> bool:
    """Whether the second of these descending scores is so close to the first that rounding could decide."""
    return len(scores) > 1 and scores[0] > -math.inf and scores[1] >= scores[0] - NEAR
