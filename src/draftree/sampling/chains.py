"""Chains of first choices: what a pass in C needs to choose the tokens of all levels without its caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.sampling.logits import RowNoise

Choice = tuple[int, float]
"""A token and the logarithm of its share of the softmax of its row's scores; NaN if the row has no sound score."""


@dataclass(frozen=True, slots=True)
class ChainSearch:
    """How the tokens of one chain are chosen.

    Attributes:
        noise: for each level, the noise of its row; all of one temperature.
        least: for each level, the logarithm of the share that a token needs to be followed by another one.
    """

    noise: RowNoise
    least: Sequence[float]
