"""Rows of logits as a pass returns them: opaque until a tensor is requested.

A search divides by the temperature, adds noise and ranks. Implementations round logarithms in their own ways. Where
two scores are so close that this could decide a target token, they are computed again in double precision, so that the
token is the same for every implementation. `SubsetLogits` holds some tokens of a vocabulary: all others have -inf.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.core.noise import gumbel, gumbel_of_few
from draftree.core.tensors import on_host, runs_triton, to_device, to_host, widened

# Largest entries of rows as wide as a vocabulary.
#
# On a CPU numpy's vectorised searches take a fifth to a tenth of the time of torch's, and give the same values.

ROWS_IN_CACHE = 4


def argmax(scores: Tensor) -> list[int]:
    """Return the column of the largest entry of each row, the first of equals; a NaN counts as the largest.

    Args:
        scores: shape (rows, columns).
    """
    if _numpy_reads(scores):
        return scores.numpy().argmax(axis=-1).tolist()
    return to_host(scores.argmax(dim=-1))


def read_leading(scores: Tensor, count: int) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Return columns and values of the `count` largest entries of each row, and `log_total`; in one transfer."""
    columns, values = leading(scores, count)
    total = log_total(scores)
    if _numpy_reads(scores):
        return columns.tolist(), values.tolist(), total[:, 0].tolist()
    rows = to_host(torch.cat((widened(columns), widened(values), widened(total)), dim=1))
    return (
        [[int(column) for column in row[:count]] for row in rows],
        [row[count:-1] for row in rows],
        [row[-1] for row in rows],
    )


def descending(values: Tensor) -> Tensor:
    """Return values of shape (rows, columns) with each row in descending order; a NaN counts as the largest."""
    if _numpy_reads(values):
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values


def largest(values: Tensor, count: int) -> Tensor:
    """Return the `count` largest of the values (rows, columns) of each row, in descending order, (rows, count).

    Columns fall into groups, and the groups with the `count` largest maxima hold the `count` largest values.
    With sqrt(columns / count) columns to a group, a row takes two short searches in place of a long one.
    """
    rows, columns = values.shape
    width = math.isqrt(columns // count)
    if width < 2:
        return descending(values)[:, :count]
    groups = columns // width
    blocks = values[:, : groups * width].unflatten(1, (width, groups))
    chosen = _largest_columns(blocks.amax(dim=1), count)
    candidates = blocks.gather(2, chosen[:, None, :].expand(rows, width, count)).flatten(1)
    candidates = torch.cat((candidates, values[:, groups * width :]), dim=1)
    return descending(candidates)[:, :count]


def leading(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return columns and values of the `count` largest entries of each row, in descending order, both (rows, count).

    Found by groups as in `largest`; of equal values the first column stands first, and a NaN counts as the largest.
    """
    if not _numpy_reads(values):
        best = values.topk(count, dim=-1)
        return best.indices, best.values
    if count == 1:
        columns = torch.from_numpy(values.numpy().argmax(axis=-1))[:, None]
        return columns, values.gather(-1, columns)
    candidates = _candidates(values, count)
    scores = values.gather(-1, candidates)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]
    return candidates.gather(-1, order), scores.gather(-1, order)


def log_total(scores: Tensor) -> Tensor:
    """Logarithm of each row's sum of exponentials, shape (rows, 1); a few rows at a time, which stay in the cache."""
    if not _numpy_reads(scores):
        return scores.logsumexp(dim=-1, keepdim=True)
    return torch.cat([part.logsumexp(dim=-1, keepdim=True) for part in scores.split(ROWS_IN_CACHE)])


def _candidates(values: Tensor, count: int) -> Tensor:
    """Columns that hold each row's `count` largest values, at least so many, ascending."""
    columns = values.shape[-1]
    width = math.isqrt(columns // count)
    if width < 2:
        return _largest_columns(values, count).sort(dim=-1).values
    groups = columns // width
    chosen = _largest_columns(values[:, : groups * width].unflatten(1, (width, groups)).amax(dim=1), count)
    members = (torch.arange(width)[:, None] * groups + chosen[:, None, :]).flatten(1)
    rest = torch.arange(groups * width, columns).expand(len(values), -1)
    held = torch.cat((members, rest), dim=1)
    kept = _largest_columns(values.gather(-1, held), count)
    return held.gather(-1, kept).sort(dim=-1).values


def drop_below(values: Tensor, least: Tensor) -> Tensor:
    """Set values below `least`, shape (rows, 1), to -inf, in place."""
    if not _numpy_reads(values):
        return values.masked_fill_(values < least, -math.inf)
    # threshold_ keeps what is strictly larger; row by row it takes a sixth of the time of masked_fill_
    bounds = torch.nextafter(least, torch.full_like(least, -math.inf)).flatten().tolist()
    for row, bound in zip(values, bounds, strict=True):
        torch.threshold_(row, bound, -math.inf)
    return values


def _numpy_reads(values: Tensor) -> bool:
    return on_host(values)


def _largest_columns(values: Tensor, count: int) -> Tensor:
    if _numpy_reads(values):
        chosen = np.argpartition(values.numpy(), values.shape[-1] - count, axis=-1)
        return torch.from_numpy(chosen[:, values.shape[-1] - count :])
    return torch.topk(values, count, dim=-1, sorted=False).indices


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
        return self._tensor.shape[0]

    @property
    def width(self) -> int:
        return self._tensor.shape[1]

    def tensor(self) -> Tensor:
        return self._tensor

    def rows(self, start: int, stop: int) -> TensorLogits:
        return TensorLogits(self._tensor[start:stop])

    def narrowed(self, width: int) -> TensorLogits:
        return TensorLogits(self._tensor[:, :width])

    def replaced(self, tensor: Tensor) -> TensorLogits:
        return TensorLogits(tensor)

    def picks(self, noise: RowNoise) -> Picks:
        """Picks with one transfer from the device; more only where scores are close."""
        if not noise:
            return Picks([], [])
        picks, is_sound, is_close = self._best(noise)
        for row, entry in enumerate(noise):
            if entry is not None and is_sound[row] and is_close[row]:
                scores = perturbed(self._tensor[row : row + 1], [entry])[0]
                tokens = to_host((scores >= scores.amax() - NEAR).nonzero()[:, 0])
                picks[row] = decided(tokens, to_host(self._tensor[row, tokens]), entry)
        return Picks(picks, is_sound)

    def _best(self, noise: RowNoise) -> tuple[list[int], list[bool], list[bool]]:
        """The column of each row's largest score, whether it is a number, and whether another score is near."""
        if any(noise) and _has_kernel(self._tensor):
            from draftree.sampling.choice_kernel import choices

            best_of_rows = choices(self._tensor, noise, None)
            return (
                [choice.token for choice in best_of_rows],
                [math.isfinite(choice.score) and not math.isnan(choice.total) for choice in best_of_rows],
                [choice.second >= choice.score - NEAR for choice in best_of_rows],
            )
        scores = perturbed(self._tensor, noise)
        best = torch.tensor(argmax(scores)) if on_host(scores) else scores.argmax(dim=-1)
        highest = scores.gather(-1, best[:, None])
        facts = [best, highest[:, 0].isfinite().long()]
        if any(noise):
            facts.append((scores >= highest - NEAR).sum(dim=-1))
        columns, sound, *near = to_host(torch.stack(facts))
        counts = near[0] if near else [1] * len(columns)
        return columns, [bool(flag) for flag in sound], [count > 1 for count in counts]

    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        if count == 1 and noise and _has_kernel(self._tensor):
            return _single(self._tensor, noise, None)
        scores = perturbed(self._tensor, noise, overwrites=overwrites)
        return Top(*read_leading(scores, count))


def _has_kernel(logits: Tensor) -> bool:
    """Whether our kernel searches these logits."""
    return runs_triton(logits.device) and logits.dtype == torch.float32 and logits.stride(1) == 1


def _single(logits: Tensor, noise: RowNoise, token_ids: Tensor | None) -> Top:
    """The largest entry of each row, by our kernel."""
    from draftree.sampling.choice_kernel import choices

    row_choices = choices(logits, noise, token_ids)
    return Top([[c.token] for c in row_choices], [[c.score] for c in row_choices], [c.total for c in row_choices])


def decided(tokens: Sequence[int], logits: Sequence[float], noise: tuple[tuple[int, int], float]) -> int:
    """The pick among a few tokens of one row, in double precision.

    Args:
        tokens: ascending.
    """
    keys, temperature = noise
    pairs = zip(logits, gumbel_of_few(keys, tokens), strict=True)
    scores = [value / temperature + added for value, added in pairs]
    return tokens[max(range(len(tokens)), key=scores.__getitem__)]


def perturbed(logits: Tensor, noise: RowNoise, *, overwrites: bool = False, token_ids: Tensor | None = None) -> Tensor:
    """Logits over temperature, plus noise.

    Args:
        logits: shape (rows, width).
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


# Logits of some tokens of a vocabulary: all others have -inf.
#
# A head with a draft vocabulary computes few columns. Where only temperature and noise count, they are ranked without
# rows of the whole vocabulary: the noise of a column is that of its token.


@final
class TokenSubset:
    """Tokens that have a column.

    Args:
        ids: their token ids, ascending, shape (columns,), on the device of the logits.
    """

    __slots__ = ("columns", "names", "token_ids", "width")

    def __init__(self, ids: Tensor, width: int) -> None:
        self.columns = ids.long()
        self.token_ids = ids.int()
        self.names: list[int] = to_host(self.columns)
        self.width = width


@final
class SubsetLogits(Logits):
    """Logits of the tokens of a subset.

    Args:
        tensor: shape (rows, columns), float32 or float64.
    """

    __slots__ = ("_subset", "_tensor")

    def __init__(self, tensor: Tensor, subset: TokenSubset) -> None:
        assert tensor.shape[1] == len(subset.names), "every column has a token"
        self._tensor = tensor
        self._subset = subset

    @property
    def num_rows(self) -> int:
        return self._tensor.shape[0]

    @property
    def width(self) -> int:
        return self._subset.width

    def tensor(self) -> Tensor:
        rows = self._tensor.new_full((self.num_rows, self.width), -math.inf)
        return rows.index_copy_(1, self._subset.columns, self._tensor)

    def columns(self) -> Tensor:
        return self._tensor

    def rows(self, start: int, stop: int) -> SubsetLogits:
        return SubsetLogits(self._tensor[start:stop], self._subset)

    def narrowed(self, width: int) -> TensorLogits:
        return TensorLogits(self.tensor()[:, :width])

    def replaced(self, tensor: Tensor) -> TensorLogits:
        return TensorLogits(tensor)

    def picks(self, noise: RowNoise) -> Picks:
        return TensorLogits(self.tensor()).picks(noise)

    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        names = self._subset.names
        if count == 1 and noise and _has_kernel(self._tensor):
            single = _single(self._tensor, noise, self._subset.token_ids)
            return single._replace(tokens=[[names[column] for column in row] for row in single.tokens])
        scores = perturbed(self._tensor, noise, overwrites=overwrites, token_ids=self._subset.token_ids)
        columns, values, totals = read_leading(scores, min(count, len(names)))
        return Top([[names[column] for column in row] for row in columns], values, totals)


def _ignored(num_rows: int) -> None:
    """Do nothing."""


@final
class PickedRows(Logits):
    """The target's picks at rows of a pass; -1 at rows beside the accepted path.

    Args:
        on_picks: called with the number of rows whenever they are picked.
    """

    __slots__ = ("_on_picks", "_tokens", "_width")
    has_controls: ClassVar[bool] = True

    def __init__(self, tokens: Sequence[int], width: int, on_picks: Callable[[int], None] = _ignored) -> None:
        self._tokens, self._width, self._on_picks = list(tokens), width, on_picks

    @property
    def num_rows(self) -> int:
        return len(self._tokens)

    @property
    def width(self) -> int:
        return self._width

    def tensor(self) -> Tensor:
        raise UnsupportedModelError("this target returns accepted tokens and no logits: leave out what needs them")

    def rows(self, start: int, stop: int) -> PickedRows:
        return PickedRows(self._tokens[start:stop], self._width, self._on_picks)

    def narrowed(self, width: int) -> PickedRows:
        return self

    def replaced(self, tensor: Tensor) -> Logits:
        self.tensor()
        return self

    def picks(self, noise: RowNoise) -> Picks:
        """The picks, in which the request's controls and noise are applied already."""
        self._on_picks(len(self._tokens))
        return Picks(list(self._tokens), [True] * len(self._tokens))

    def top(self, noise: RowNoise, count: int, *, overwrites: bool = False) -> Top:
        self.tensor()
        return Top([], [], [])
