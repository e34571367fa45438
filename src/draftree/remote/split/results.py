"""Results of a split pass: states become logits on the device, or the server's picks take their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftree.models.base import Extend
from draftree.models.kv.slotted import SlottedModel
from draftree.remote.errors import RefusedError
from draftree.sampling.logits import Logits, PickedRows, TensorLogits

__all__ = ["joined_states", "picked_rows", "read_out", "rows_of"]


def rows_of(job: Extend) -> Sequence[int]:
    """Return the nodes of a job whose logits are requested, ascending."""
    return range(len(job.tokens)) if job.logits_at is None else job.logits_at


def joined_states(parts: Sequence[Tensor], num_layers: int, hidden: int) -> Tensor:
    """Return the states of successive parts of a text, shape (nodes, layers, hidden)."""
    return torch.cat(list(parts)) if parts else torch.empty(0, num_layers, hidden)


def read_out(local: SlottedModel, jobs: Sequence[Extend], states: Sequence[Tensor]) -> Logits:
    """Return the logits of the requested nodes.

    Args:
        local: model with the final norm and the output head.
        jobs: of the pass.
        states: for each job the outputs of the last layer of its last nodes, shape (nodes, hidden).
    """
    rows: list[Tensor] = []
    for job, own in zip(jobs, states, strict=True):
        first = len(job.tokens) - len(own)
        rows += [own[row - first] for row in rows_of(job)]
    if not rows:
        return TensorLogits(torch.empty(0, local.vocab_size))
    return local.read_out(torch.stack(rows))


def picked_rows(jobs: Sequence[Extend], results: Sequence[Sequence[Any]], vocab: int) -> PickedRows:
    """Return the server's picks at the requested nodes.

    Args:
        jobs: of the pass.
        results: for each job its picks, in parts.
        vocab: tokens of the vocabulary.

    Raises:
        RefusedError: a pick is no token.
    """
    found: list[int] = []
    for job, parts in zip(jobs, results, strict=True):
        picks = [pick for part in parts for pick in part]
        if not all(0 <= pick < vocab for pick in picks):
            raise RefusedError("the server picked a token beyond the vocabulary", code="bad_reply")
        first = len(job.tokens) - len(picks)
        found += [picks[row - first] for row in rows_of(job)]
    return PickedRows(found, vocab)
