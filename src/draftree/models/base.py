"""Model seam: `LanguageModel`, whose slots hold a committed prefix and a tentative tree.

Prefill, decoding, verification and drafting use two calls: `run` computes a pass, `apply` edits slots. Passes and edits
are plain data (`models/operations.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, final

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.core.tensors import synchronize
from draftree.models.embeddings import EmbeddingFacts
from draftree.models.lock import ModelLock
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
    SlotRequest,
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
    "SlotRequest",
    "Truncate",
]


class LanguageModel(ABC):
    """A causal language model with slots."""

    vocab_size: int
    max_length: int
    """Maximum number of positions: prefix plus tree depth."""
    supports_trees: bool
    """Whether tentative trees may branch; if False, they must be chains."""
    device: torch.device
    dtype: torch.dtype
    is_exact: bool = False
    """Whether a token's logits are bit-identical alone, in any tree and in any batch."""
    fingerprint: str = ""
    """Identity of the weights, independent of the name; empty if unknown."""
    num_layers: int = 0
    """Number of layers that `LayerSubset` can select from; 0 if only whole passes are supported."""
    applies_controls: bool = False
    """Whether passes return final picks in place of logits: the model applies controls and noise of requests itself."""
    returns_states: bool = False
    """Whether a model that applies controls returns hidden states of the accepted path nevertheless."""
    max_open: int | None = None
    """Most slots that may be open at the same time; None if only memory limits them."""
    num_sublayer_runs: int = 0
    """Rows computed by attentions and perceptrons so far, summed over sublayers."""
    self_check: CheckResult | None = None
    """Result of the self-check at load; None if it was not run."""
    streams_weights: bool = False
    """Whether passes read weights from a file, so that one over hundreds of rows costs hardly more than over one."""

    @final
    @property
    def lock(self) -> ModelLock:
        """The lock of all threads and engines that use the model; passes are run and slots are edited under it."""
        lock: ModelLock = self.__dict__.setdefault("_lock_of_model", ModelLock())
        return lock

    @final
    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to pickle or copy a model, whose slots and native memory have no copy."""
        raise TypeError(f"{type(self).__name__} can be neither pickled nor copied: load the model again, or share it")

    @property
    def here(self) -> LanguageModel:
        """The model whose passes run in this process: this one, unless layers of it run elsewhere."""
        return self

    @property
    def footprint(self) -> Footprint:
        """Memory of the model in bytes; zero if negligible."""
        return NOTHING

    @property
    def note(self) -> str:
        """Message for the user about the passes so far; empty if there is none."""
        return ""

    def known_costs(self, max_rows: int) -> Mapping[int, float] | None:
        """Return seconds of passes by rows, up to at least `max_rows`; None if they have to be measured."""
        return None

    def opener(self, request: SlotRequest) -> Callable[[], Slot] | None:
        """Return a function that opens the slot of a request; None if token ids alone determine a slot.

        Raises:
            InvalidRequestError: the model cannot honour a parameter of the request.
        """
        return None

    @property
    def num_warm_ups(self) -> int:
        """Number of slower first passes of each shape."""
        return 0

    def synchronize(self) -> None:
        """Wait until the device has finished all queued passes."""
        synchronize(self.device)

    def settle(self) -> None:
        """Finish work that would slow the first passes, such as copies of mapped weights. Call it before measuring."""
        return

    @property
    def num_open(self) -> int:
        """Number of open slots; 0 if the model does not count them."""
        return 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the bookkeeping of slots contradicts itself; for tests and soaks."""
        assert self.num_open >= 0, "no slot is closed twice"

    @abstractmethod
    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for `num_slots` open slots of `length` tokens, tentative ones included. Open slots are kept."""

    @abstractmethod
    def open(self) -> Slot:
        """Return an empty slot."""

    def open_probe(self) -> Slot:
        """Return an empty slot for checks and measurements."""
        return self.open()

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
            f"{type(self).__name__} cannot run a part of its layers: choose a drafter that runs none"
        )

    def quantized_copy(self, quantization: str) -> LanguageModel:
        """Return a copy with weights of fewer bits that appends partial nodes to this model's slots.

        Raises:
            UnsupportedModelError: the model has none.
        """
        raise UnsupportedModelError(
            f"{type(self).__name__} has no copy with {quantization} weights: that needs passes in C (kernels 'native')"
        )

    def input_embedding(self) -> Tensor:
        """Return the embedding as passes use it, shape (vocab, hidden), in the model's dtype; read only.

        Raises:
            UnsupportedModelError: the model does not expose it.
        """
        raise UnsupportedModelError(f"{type(self).__name__} has no input embedding: choose a drafter that needs none")

    def output_head(self) -> Tensor:
        """Return the output head as passes use it, shape (vocab, hidden), in the model's dtype; read only.

        int8 weights are returned multiplied by their scales.

        Raises:
            UnsupportedModelError: the model does not expose it.
        """
        raise UnsupportedModelError(f"{type(self).__name__} has no output head: choose a drafter that needs none")

    def embedding_facts(self) -> EmbeddingFacts:
        """Return how the model uses its embedding and its head.

        Raises:
            UnsupportedModelError: `EmbeddingFacts` cannot express it.
        """
        raise UnsupportedModelError(f"{type(self).__name__} has no output head: choose a drafter that needs none")

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return outputs of the last layer after the final norm, computed in float32.

        `embedding_facts().logits(final_norm(hidden), output_head())` gives the logits of a pass within rounding.

        Args:
            hidden: captured outputs of the last layer, shape (..., hidden), any floating dtype.

        Returns:
            The same shape, float32.

        Raises:
            UnsupportedModelError: what follows the last layer is not one norm, or is unknown.
        """
        raise UnsupportedModelError(f"{type(self).__name__} has no final norm: choose a drafter that needs none")

    def require_capture(self, layers: Sequence[int]) -> None:
        """Check that the hidden states of these layers can be captured.

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
        """Apply a `Fork`; None copies the whole prefix."""
        return self.apply([Fork(slot, slot.length if length is None else length)])[0]

    @final
    def close(self, slot: Slot) -> None:
        """Apply a `Close`."""
        self.apply([Close(slot)])
