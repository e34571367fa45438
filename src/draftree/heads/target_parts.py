"""Parts of the target that a head shares: embedding, output head and final norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from draftree.models.base import LanguageModel
from draftree.models.embeddings import EmbeddingFacts


@dataclass(frozen=True, slots=True, eq=False)
class TargetParts:
    """Parts of a target, read only. Heads use them without copies.

    Attributes:
        embedding: the embedding as passes use it, not scaled, shape (vocabulary, target hidden).
        output: the output head, shape (vocabulary, target hidden).
        facts: scales, cap and bias of both.
        finish: the final norm: outputs of the last layer, shape (..., target hidden), to the head's input.
        num_layers: number of the target's layers.
    """

    embedding: Tensor
    output: Tensor
    facts: EmbeddingFacts
    finish: Callable[[Tensor], Tensor]
    num_layers: int

    @classmethod
    def of(cls, model: LanguageModel) -> TargetParts:
        """Return the parts of a loaded model.

        Raises:
            UnsupportedModelError: the model does not expose them.
        """
        facts = model.embedding_facts()
        output = model.output_head()
        embedding = output if facts.is_tied else model.input_embedding()
        return cls(embedding, output, facts, model.final_norm, model.num_layers)

    @property
    def vocab_size(self) -> int:
        """Number of rows of the output head, the width of the target's logits."""
        return self.output.shape[0]

    @property
    def hidden(self) -> int:
        """Width of the target's hidden states."""
        return self.output.shape[1]
