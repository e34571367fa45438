"""The model seam: a slot holds a committed prefix and a tentative tree.

A pass is a value, and so is an edit of slots. Prefill, decoding, verification, a drafter that grows its tree level by
level and beam search all consist of `run` and `apply`. `models/encoding.py` encodes both as plain data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.core.transfer import synchronize
from draftree.models.embeddings import EmbeddingFacts
from draftree.models.memory import NOTHING, Footprint
from draftree.models.operations import (
    ALL_LAYERS,
    Close,
    Commit,
    Edit,
    Extend,
    Fork,
    LayerSubset,
    Pass,
    PassResult,
    Slot,
    Truncate,
)

if TYPE_CHECKING:
    from draftree.models.check import CheckResult

__all__ = [
    "ALL_LAYERS",
    "Close",
    "Commit",
    "Edit",
    "Extend",
    "Fork",
    "LanguageModel",
    "LayerSubset",
    "Pass",
    "PassResult",
    "Slot",
    "Truncate",
]


class LanguageModel(ABC):
    """A causal language model with slots."""

    vocab_size: int
    max_length: int
    """Positions the model knows: longest prefix plus tree depth."""
    supports_trees: bool
    """False: only chains may be tentative."""
    device: torch.device
    dtype: torch.dtype
    is_exact: bool = False
    """Whether a token's logits are bit-identical, however it is scored: alone, in any tree, in any batch."""
    fingerprint: str = ""
    """Tells this model from others, under whatever name it is loaded; empty if it cannot be told."""
    num_layers: int = 0
    """Layers of which a part can be run; 0 if none can."""
    num_sublayer_runs: int = 0
    """Rows that attentions and perceptrons have computed so far, one count for each row of each of them."""
    self_check: CheckResult | None = None
    """What the check at load found; None where there was none."""

    @property
    def footprint(self) -> Footprint:
        """Bytes that it takes; nothing where it takes next to nothing."""
        return NOTHING

    @property
    def num_warm_ups(self) -> int:
        """Passes of a shape before one takes as long as all later ones."""
        return 0

    def synchronize(self) -> None:
        """Wait until the device has done all passes so far; on a card a pass returns when it is queued."""
        synchronize(self.device)

    @property
    def num_open(self) -> int:
        """Slots that are open now; 0 for a model that need not know."""
        return 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping of slots contradicts itself; for tests and soaks."""
        assert self.num_open >= 0, "no slot is closed twice"

    @abstractmethod
    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for this many open slots of this many tokens, tentative ones included. What is open stays."""

    @abstractmethod
    def open(self) -> Slot:
        """An empty slot."""

    @abstractmethod
    def run(self, pass_: Pass) -> PassResult:
        """Append tentative (or partial) nodes to slots, all in one batched pass.

        Raises:
            UnsupportedModelError: the model cannot capture these layers.
        """

    @abstractmethod
    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """Apply edits in order; returns the slots that forks opened. Successive commits are one operation."""

    def require_part(self, part: LayerSubset) -> None:
        """Raise UnsupportedModelError if this part cannot be run."""
        raise UnsupportedModelError(
            f"{type(self).__name__} cannot run a part of its layers: take a drafter that does not ask for one"
        )

    def input_embedding(self) -> Tensor:
        """The embedding as passes use it, shape (vocab, hidden), in the model's dtype; not to be changed.

        Raises:
            UnsupportedModelError: the model has none that can be read.
        """
        raise UnsupportedModelError(f"{type(self).__name__} has no input embedding: take a drafter that needs none")

    def output_head(self) -> Tensor:
        """The matrix that makes logits as passes use it, shape (vocab, hidden), in the model's dtype.

        Not to be changed. With int8 weights it is the product of the 8-bit numbers and their scales.

        Raises:
            UnsupportedModelError: the model has none that can be read.
        """
        raise UnsupportedModelError(f"{type(self).__name__} has no output head: take a drafter that needs none")

    def embedding_facts(self) -> EmbeddingFacts:
        """How the model uses both.

        Raises:
            UnsupportedModelError: it does more with them than `EmbeddingFacts` can express.
        """
        raise UnsupportedModelError(f"{type(self).__name__} has no output head: take a drafter that needs none")

    def require_capture(self, layers: Sequence[int]) -> None:
        """Refuse layers that cannot be captured.

        Raises:
            UnsupportedModelError: the model cannot capture these layers.
        """
        if layers:
            raise UnsupportedModelError(
                f"{type(self).__name__} does not return hidden states of its layers: choose a drafter that needs none"
            )

    @final
    def commit(self, slot: Slot, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """Apply a `Commit`."""
        self.apply([Commit(slot, path, keep)])

    @final
    def truncate(self, slot: Slot, length: int) -> None:
        """Apply a `Truncate`."""
        self.apply([Truncate(slot, length)])

    @final
    def fork(self, slot: Slot, length: int | None = None) -> Slot:
        """Apply a `Fork`, of the whole prefix if no length is given."""
        return self.apply([Fork(slot, slot.length if length is None else length)])[0]

    @final
    def close(self, slot: Slot) -> None:
        """Apply a `Close`."""
        self.apply([Close(slot)])
