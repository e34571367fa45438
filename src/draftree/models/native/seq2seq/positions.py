"""Positions of decoders of transformers: tables that are added to embeddings, and biases of scores by distance."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftree.models.native.blueprint import ScoreBias
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.modules import Names, first_part


@dataclass(frozen=True, slots=True)
class PositionTable:
    """Table of positions.

    Attributes:
        name: name of the parameter or buffer.
        offset: row of position 0.
        length: number of positions.
        unplaced: token to which no position is added; None for none.
    """

    name: str
    offset: int
    length: int
    unplaced: int | None


def position_table(model: Any, decoder: Any) -> PositionTable | None:
    """Return the table of a decoder; None for none.

    Raises:
        NativeUnavailableError: its positions are computed in an unknown way.
    """
    found = first_part(decoder, "embed_positions")
    if found is None:
        return None
    prefix = next(name for name, module in model.named_modules() if module is found)
    if isinstance(found, nn.Embedding):
        offset = int(getattr(found, "offset", 0))
        return PositionTable(f"{prefix}.weight", offset, int(found.weight.shape[0]) - offset, None)
    if not isinstance(getattr(found, "weights", None), Tensor):
        raise NativeUnavailableError(f"its positions are a {type(found).__name__}, not a table")
    # padding tokens have the position of padding, a row of zeros
    pad, length = int(found.padding_idx), int(model.config.max_position_embeddings)
    rows = length + pad + 1
    if rows > found.weights.shape[0]:
        found.make_weights(rows, found.embedding_dim, pad)
    if found.weights[pad].any():
        raise NativeUnavailableError("the position of its padding tokens is not zero")
    return PositionTable(f"{prefix}.weights", pad + 1, length, pad)


@torch.inference_mode()
def score_bias_of(attention: Any, names: Names) -> ScoreBias | None:
    """Return the bias by distance of an attention that has one of its own; None for none."""
    table = getattr(attention, "relative_attention_bias", None)
    if table is None:
        return None
    distance = int(attention.relative_attention_max_distance)
    count = int(attention.relative_attention_num_buckets)
    settings = {"bidirectional": False, "num_buckets": count, "max_distance": distance}
    known = inspect.signature(attention._relative_position_bucket).parameters  # some families read their own settings
    given = {name: value for name, value in settings.items() if name in known}
    buckets = attention._relative_position_bucket(-torch.arange(distance + 1), **given)
    return ScoreBias(names.of(table), tuple(buckets.tolist()))
