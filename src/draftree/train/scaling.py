"""Hidden states of size 1 for training: the first product of a head sees them divided by the sizes of their elements.

Elements of a residual stream differ in size by orders of magnitude, so the weights that read them must differ too. An
optimizer with equal steps for all weights then changes some by many times their size. Training therefore divides hidden
states by fixed sizes; the division is folded into the first product before a head is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftree.train.data.texts import Text
from draftree.train.head_trainee import Texts

__all__ = ["SIZED_TEXTS", "ScaledTexts", "feature_sizes", "fold", "unfold"]

SIZED_TEXTS = 64
"""Texts from which sizes are taken."""


class ScaledTexts:
    """Texts with some of their hidden states, divided by sizes.

    Args:
        data: the texts.
        places: places of the hidden states that are kept, in order.
        sizes: sizes of their elements, shape (places, target hidden).
    """

    def __init__(self, data: Texts, places: Sequence[int], sizes: Tensor) -> None:
        self._data, self._places, self.sizes = data, list(places), sizes

    def __getitem__(self, index: int) -> Text:
        text = self._data[index]
        features = text.features[:, self._places]
        return replace(text, features=(features.float() / self.sizes).to(features.dtype))

    def stored(self, index: int) -> Text:
        """Return a text with all hidden states as they are stored."""
        return self._data[index]


@torch.no_grad()
def feature_sizes(texts: Iterable[Text], places: Sequence[int]) -> Tensor:
    """Return the root mean square of each element of hidden states, shape (places, target hidden), float32.

    Elements that are nearly constant 0 count as a tenth of the median size of their layer.

    Args:
        texts: the texts.
        places: places of hidden states, in order.
    """
    total, count = torch.zeros(()), 0
    for text in texts:
        total = total + text.features[:, list(places)].double().square().sum(dim=0)
        count += text.num_rows
    sizes = (total / max(1, count)).sqrt()
    least = 0.1 * sizes.median(dim=-1, keepdim=True).values
    return sizes.maximum(least).clamp_min(1e-6).float()


@torch.no_grad()
def fold(head: Any, sizes: Tensor) -> None:
    """Change the first product so that it reads hidden states as they are; nothing for norms before it."""
    if _reads_plainly(head):
        head.fc.weight.copy_(head.fc.weight.float() / sizes.flatten().to(head.fc.weight.device))


@torch.no_grad()
def unfold(head: Any, sizes: Tensor) -> None:
    """Undo `fold`."""
    if _reads_plainly(head):
        head.fc.weight.copy_(head.fc.weight.float() * sizes.flatten().to(head.fc.weight.device))


def _reads_plainly(head: Any) -> bool:
    return not (head.config.fc_norm or head.config.norm_before_fc)


def sizes_for(config: Any, texts: Iterable[Text], places: Sequence[int]) -> Tensor:
    """Return sizes for a head: 1 if it has norms before its first product."""
    sizes = feature_sizes(texts, places)
    return torch.ones_like(sizes) if config.fc_norm or config.norm_before_fc else sizes
