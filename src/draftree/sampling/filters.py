"""Filters that keep only the more likely tokens of each row: top-k, top-p, min-p.

Each computes the smallest logit that a row keeps and keeps every token that reaches it. So tokens of equal logits
are kept or dropped together, and the result depends neither on their order nor on the other rows. (A sort would keep
some of them, and which ones would change with the batch.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from draftree.sampling.search import drop_below, largest

_NUCLEI = (256, 2048)
"""Numbers of largest logits in which top-p searches before it sorts whole rows."""


class Filter(ABC):
    """One control over rows of logits that is independent of the previous tokens."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return logits with the dropped tokens at -inf; every row keeps its largest.

        Args:
            logits: logits over temperature, shape (rows, vocab), finite or -inf; may be changed in place.

        Returns:
            Same shape and dtype; perhaps the same tensor.
        """


class TopK(Filter):
    """Keeps the `count` largest logits, including ties with the smallest of them.

    Args:
        count: at least 1.
    """

    __slots__ = ("_count",)

    def __init__(self, count: int) -> None:
        self._count = count

    def apply(self, logits: Tensor) -> Tensor:
        """Set the other logits to -inf."""
        return drop_below(logits, largest(logits, min(self._count, logits.shape[-1]))[:, -1:])


class TopP(Filter):
    """Keeps a token if all more likely tokens together have a probability below `mass`.

    Args:
        mass: above 0, below 1.
    """

    __slots__ = ("_mass",)

    def __init__(self, mass: float) -> None:
        self._mass = mass

    def apply(self, logits: Tensor) -> Tensor:
        """Set the other logits to -inf."""
        # softmax sums each row independently, so that a row's mass is the same in every batch
        peak = torch.softmax(logits, dim=-1).amax(dim=-1, keepdim=True)
        return drop_below(logits, self._least(logits, peak, (*_NUCLEI, logits.shape[-1])))

    def _least(self, logits: Tensor, peak: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Return the smallest kept logit per row, searched among its `counts[0]` largest, or else more."""
        values = largest(logits, min(counts[0], logits.shape[-1]))
        mass = (values - values[:, :1]).exp_().mul_(peak).cumsum(dim=-1, dtype=torch.float64)
        wanted = torch.full_like(mass[:, :1], self._mass)
        least = values.gather(1, torch.searchsorted(mass, wanted).clamp_(max=values.shape[-1] - 1))
        short = (mass[:, -1] < self._mass) & ~values[:, -1].isneginf()
        if len(counts) > 1 and bool(short.any()):
            least[short] = self._least(logits[short], peak[short], counts[1:])
        return least


class MinP(Filter):
    """Keeps the tokens that are at least `fraction` times as likely as the most likely one.

    Args:
        fraction: above 0, up to 1.
    """

    __slots__ = ("_log_fraction",)

    def __init__(self, fraction: float) -> None:
        self._log_fraction = math.log(fraction)

    def apply(self, logits: Tensor) -> Tensor:
        """Set the other logits to -inf."""
        return drop_below(logits, logits.amax(dim=-1, keepdim=True) + self._log_fraction)
