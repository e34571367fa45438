"""Helpers for models that are started twice. Not a test itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftree.loading.loaded import LoadedModel
from draftree.models.base import Extend, Pass
from families import VOCAB_SIZE

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "max_position_embeddings": 400,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 of float32": {"dtype": "float32", "quantization": "int8"},
}
TREE = [-1, 0, 0, 2, -1, 4]


def logits(loaded: LoadedModel) -> Tensor:
    """Return the logits after a text in two pieces, and in a tree after it."""
    model = loaded.model
    slot = model.open()
    text = [(7 * place) % VOCAB_SIZE for place in range(120)]
    rows = []
    for piece in (text[:70], text[70:]):
        rows.append(model.run(Pass([Extend(slot, piece, range(-1, len(piece) - 1))])).logits.tensor())
        model.commit(slot, range(len(piece)))
    rows.append(model.run(Pass([Extend(slot, [3, 9, 4, 11, 8, 2], TREE)])).logits.tensor())
    model.close(slot)
    return torch.cat(rows)
