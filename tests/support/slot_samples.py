"""Texts in slots, read in one pass or token by token. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.models.base import Extend, LanguageModel, Pass, Slot


def filled(model: LanguageModel, tokens: Sequence[int]) -> Slot:
    """A slot whose prefix is the text."""
    slot = model.open()
    if tokens:
        model.run(Pass([Extend(slot, tokens, range(-1, len(tokens) - 1), logits_at=())]))
        model.commit(slot, range(len(tokens)))
    return slot


def at_once(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Logits after every token, all scored in one pass."""
    slot = model.open()
    logits = model.run(Pass([Extend(slot, tokens, range(-1, len(tokens) - 1))])).logits.tensor()
    model.close(slot)
    return logits


def alone(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Logits after every token, each scored in its own pass."""
    slot, rows = model.open(), []
    for token in tokens:
        rows.append(model.run(Pass([Extend(slot, [token], [-1])])).logits.tensor())
        model.commit(slot, [0])
    model.close(slot)
    return torch.cat(rows)
