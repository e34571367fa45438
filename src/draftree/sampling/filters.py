"""Controls that keep only the likelier tokens of each row: top-k, top-p, min-p.

Each finds the smallest logit that a row keeps and keeps every token that reaches it. So tokens of equal logits
stay or go together, and what is kept depends neither on their order nor on the other rows. (A sort would keep
some of them, and which ones would change with the batch.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

_NUCLEUS_STEPS = (256, 4096)
"""How many of the largest logits top-p looks at before it sorts whole rows."""


class Filter(ABC):
    """One control over rows of logits that does not look at the tokens before them."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Logits with the dropped tokens at -inf; every row keeps its largest.

        Args:
            logits: logits over temperature, shape (rows, vocab), finite or -inf; may be changed in place.

        Returns:
            Same shape and dtype; perhaps the same tensor.
        """


class TopK(Filter):
    """Keeps the `count` largest logits, and others that equal the smallest of them.

    Args:
        count: at least 1.
    """

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self._count = count

    def apply(self, logits: Tensor) -> Tensor:
        """Logits with the others at -inf."""
        return _drop_below(logits, largest(logits, min(self._count, logits.shape[-1]))[:, -1:])


class TopP(Filter):
    """Keeps a token if all tokens that are likelier have less than `mass` together.

    Args:
        mass: above 0, below 1.
    """

    __slots__ = ("_mass",)

    def __init__(self, mass: float) -> None:
        self._mass = mass

    def apply(self, logits: Tensor) -> Tensor:
        """Logits with the others at -inf."""
        # softmax adds up each row by itself, so that a row's mass is the same in every batch
        peak = torch.softmax(logits, dim=-1).amax(dim=-1, keepdim=True).double()
        for count in (*_NUCLEUS_STEPS, logits.shape[-1]):
            count = min(count, logits.shape[-1])
            values = largest(logits, count)
            mass = ((values - values[:, :1]).double().exp() * peak).cumsum(dim=-1)
            complete = (mass[:, -1] >= self._mass) | values[:, -1].isneginf()
            if bool(complete.all()):
                break
        kept = 1 + (mass[:, :-1] < self._mass).sum(dim=-1, keepdim=True)
        return _drop_below(logits, values.gather(1, kept - 1))


class MinP(Filter):
    """Keeps the tokens that are at least `fraction` times as likely as the likeliest.

    Args:
        fraction: above 0, up to 1.
    """

    __slots__ = ("_log_fraction",)

    def __init__(self, fraction: float) -> None:
        self._log_fraction = math.log(fraction)

    def apply(self, logits: Tensor) -> Tensor:
        """Logits with the others at -inf."""
        return _drop_below(logits, logits.amax(dim=-1, keepdim=True) + self._log_fraction)


def largest(logits: Tensor, count: int) -> Tensor:
    """The `count` largest values of each row, in descending order, shape (rows, count).

    Columns fall into groups; the groups with the `count` largest maxima hold the `count` largest values. With
    sqrt(vocab / count) columns to a group, a row takes two small searches in place of one long one.
    """
    rows, vocab = logits.shape
    width = math.isqrt(vocab // count)
    if width < 2:
        return torch.topk(logits, count, dim=-1).values
    groups = vocab // width
    blocks = logits[:, : groups * width].unflatten(1, (width, groups))
    chosen = torch.topk(blocks.amax(dim=1), count, dim=-1, sorted=False).indices
    candidates = blocks.gather(2, chosen[:, None, :].expand(rows, width, count)).flatten(1)
    candidates = torch.cat((candidates, logits[:, groups * width :]), dim=1)
    return torch.topk(candidates, count, dim=-1).values


def _drop_below(logits: Tensor, least: Tensor) -> Tensor:
    """Set logits below `least` (shape (rows, 1)) to -inf, in place."""
    if logits.device.type != "cpu":
        return logits.masked_fill_(logits < least, -math.inf)
    # threshold_ keeps what is strictly larger; row by row it takes a sixth of the time of masked_fill_
    bounds = torch.nextafter(least, torch.full_like(least, -math.inf)).flatten().tolist()
    for row, bound in zip(logits, bounds, strict=True):
        torch.threshold_(row, bound, -math.inf)
    return logits
