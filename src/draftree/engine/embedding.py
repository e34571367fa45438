"""Embedding of a text: the mean or the last of the model's hidden states after its final norm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from draftree.core.errors import InvalidRequestError, UnsupportedModelError
from draftree.models.base import Extend, LanguageModel, Pass, Slot

__all__ = ["POOLINGS", "Embedding"]

POOLINGS = ("mean", "last")
CHUNK = 128
"""Tokens of one step, which delays the next round of other requests."""


@final
class Embedding:
    """Computes the embedding of one text in short steps, on the thread of the engine's passes. Mutated by `step`.

    Args:
        model: the model.
        ids: token ids of the text, at least one.
        pooling: "mean" of all tokens, or the "last" token.

    Raises:
        InvalidRequestError: an unknown pooling, a text that does not fit, or a model that does not return its states.
    """

    def __init__(self, model: LanguageModel, ids: Sequence[int], *, pooling: str) -> None:
        if pooling not in POOLINGS:
            raise InvalidRequestError(
                f"pooling is {pooling!r}: use {' or '.join(map(repr, POOLINGS))}", param="pooling"
            )
        if not 0 < len(ids) <= model.max_length:
            raise InvalidRequestError(
                f"a text of {len(ids)} tokens was given: 1 to {model.max_length} can be embedded", param="prompt"
            )
        try:
            if not model.num_layers:
                raise UnsupportedModelError(f"{type(model).__name__} has no layers whose states could be returned")
            model.require_capture((model.num_layers,))
        except UnsupportedModelError as error:
            raise InvalidRequestError(f"this model computes no embeddings: {error}", param="model") from error
        self._model, self._ids, self._pooling = model, list(ids), pooling
        self._slot: Slot | None = None
        self._num_read = 0
        self._sum: Tensor | None = None

    def step(self) -> Tensor | None:
        """Read the next tokens; return the embedding after the last ones, of length 1, shape (hidden,), float32."""
        return self._model.lock.run(self._step)

    def _step(self) -> Tensor | None:
        model = self._model
        if self._slot is None:
            model.reserve(model.num_open + 1, len(self._ids))
            self._slot = model.open()
        tokens = self._ids[self._num_read : self._num_read + CHUNK]
        job = Extend(self._slot, tokens, range(-1, len(tokens) - 1), logits_at=())
        result = model.run(Pass([job], capture=(model.num_layers,)))
        states = model.final_norm(result.hidden_of(0)[:, 0])
        model.commit(self._slot, range(len(tokens)))
        self._num_read += len(tokens)
        if self._pooling == "last":
            self._sum = states[-1]
        else:
            self._sum = states.sum(dim=0) if self._sum is None else self._sum + states.sum(dim=0)
        if self._num_read < len(self._ids):
            return None
        return torch.nn.functional.normalize(self._sum.float(), dim=0).cpu()

    def close(self) -> None:
        """Free the slot."""
        if self._slot is not None:
            self._model.lock.between(partial(self._model.close, self._slot))
            self._slot = None
