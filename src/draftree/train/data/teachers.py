"""The most likely next tokens of captured states, for data with a top-k teacher."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.models.base import LanguageModel
from draftree.train.data.texts import TopRows

HIDDEN, TOP_K = "hidden", "top-k"
ROWS = 256
"""Rows of logits that are computed at a time."""


def top_k_of(teacher: str, vocab_size: int) -> int | None:
    """Return K of "top-k:K", or None for "hidden".

    Raises:
        ConfigurationError: another teacher, or a count out of range.
    """
    kind, _, count = teacher.partition(":")
    if teacher == HIDDEN:
        return None
    if kind != TOP_K or not count.isdecimal() or not 0 < int(count) <= vocab_size:
        raise ConfigurationError(
            f"teacher is '{teacher}': give 'hidden', or 'top-k:K' with K from 1 to {vocab_size}, such as top-k:64"
        )
    return int(count)


@final
class TopTeacher:
    """Computes the most likely next tokens of states, in float32.

    Args:
        model: the target.
        count: number of tokens of each row.

    Raises:
        UnsupportedModelError: the model does not expose its norm and its head.
    """

    def __init__(self, model: LanguageModel, count: int) -> None:
        self._model = model
        self._count = count
        self._facts = model.embedding_facts()
        self._head = model.output_head().float()

    @torch.inference_mode()
    def top(self, last: Tensor) -> TopRows:
        """Return the top tokens of outputs of the last layer, shape (rows, hidden)."""
        parts = [self._top(rows) for rows in last.split(ROWS)]
        ids, logits, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return TopRows(ids, logits, lse)

    def _top(self, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self._facts.logits(self._model.final_norm(last), self._head.to(self._model.device))
        lse = logits.logsumexp(dim=-1)
        values, ids = logits.topk(self._count, dim=-1)
        return ids.cpu(), (values - lse[:, None]).half().float().cpu(), lse.cpu()
