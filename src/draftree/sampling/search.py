"""Largest entries of rows as wide as a vocabulary.

On a CPU numpy's vectorised searches take a fifth to a tenth of the time of torch's, and give the same values.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def argmax(scores: Tensor) -> list[int]:
    """Column of the largest entry of each row, the first of equals; a NaN counts as the largest."""
    if _numpy_reads(scores):
        return scores.numpy().argmax(axis=-1).tolist()
    return scores.argmax(dim=-1).tolist()


def descending(values: Tensor) -> Tensor:
    """Each row's values from the largest to the smallest; a NaN counts as the largest."""
    if _numpy_reads(values):
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values


def largest(values: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, in descending order, shape (rows, count).

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
    return values.device.type == "cpu"


def _largest_columns(values: Tensor, count: int) -> Tensor:
    if _numpy_reads(values):
        chosen = np.argpartition(values.numpy(), values.shape[-1] - count, axis=-1)
        return torch.from_numpy(chosen[:, values.shape[-1] - count :])
    return torch.topk(values, count, dim=-1, sorted=False).indices
