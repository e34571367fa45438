"""Weights of the decoder of an encoder-decoder model in memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftree.models.native.weights import ModelWeights


class DecoderWeights(ModelWeights):
    """Weights of a decoder; those that the encoder or sources need stay.

    Args:
        model: a `…ForConditionalGeneration`, whose decoder is unusable once weights are released.
        kept: parameters that stay.
    """

    def __init__(self, model: Any, kept: set[int]) -> None:
        super().__init__(model)
        self._owner, self._kept = model, kept

    def get(self, name: str) -> Tensor:
        """Return a parameter or a buffer in the model's dtype; a bias of one row as a vector."""
        if name in self._parameters:
            return super().get(name)
        module, _, attribute = name.rpartition(".")
        found: Tensor = getattr(self._owner.get_submodule(module), attribute)
        return found.flatten() if found.shape[0] == 1 else found

    def release(self, name: str) -> None:
        """Release a parameter that nothing else needs."""
        if name in self._parameters and id(self._parameters[name]) not in self._kept:
            super().release(name)
