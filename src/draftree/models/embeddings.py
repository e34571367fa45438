"""Scales, cap and bias with which a model uses its embedding and its output head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingFacts:
    """Operations on embeddings before the first layer, and on the product with the output head.

    Attributes:
        embedding_scale: factor of a token's embedding before the first layer. Learned positions, if any, are added
            after it.
        logit_scale: factor of the product with the head.
        soft_cap: logits are `soft_cap * tanh(logits / soft_cap)`; None for no cap.
        bias: added to the product before it is scaled, shape (vocab,), float32; None for none.
        is_tied: whether the embedding is known to equal the output head.
    """

    embedding_scale: float
    logit_scale: float
    soft_cap: float | None = None
    bias: Tensor | None = None
    is_tied: bool = False

    def logits(self, states: Tensor, head: Tensor) -> Tensor:
        """Return logits of hidden states.

        Args:
            states: outputs of the final norm, shape (..., hidden).
            head: the output head, shape (vocab, hidden).

        Returns:
            Shape (..., vocab), float32.
        """
        found = states.float() @ head.float().T
        if self.bias is not None:
            found = found + self.bias
        return self.capped(found)

    def capped(self, products: Tensor) -> Tensor:
        """Return logits from products with the head, bias included."""
        found = products * self.logit_scale
        return found if self.soft_cap is None else self.soft_cap * torch.tanh(found / self.soft_cap)
