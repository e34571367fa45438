"""Base class of encoder-decoder models with our own slots: sources, and the slots that refer to them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Close, Edit, Fork, LanguageModel, LayerSubset, Slot
from draftree.models.kv.pool import SlotPool, kv_slot
from draftree.models.kv.slots import KVSlot
from draftree.models.kv.slotted import SlottedModel
from draftree.models.source import EncoderDecoder, FeatureSource, HiddenSource, Source
from draftree.models.torch.seq2seq.sources import require_source

WITHOUT_PARTS = "is an encoder-decoder model, of which no part runs alone: choose a drafter that runs no model"


class Encoded(Protocol):
    """Encoded source.

    Attributes:
        source: the source.
        num_slots: number of slots that refer to it.
    """

    source: Source
    num_slots: int


EncodedT = TypeVar("EncodedT", bound=Encoded)


class SourcedModel(SlottedModel, EncoderDecoder, Generic[EncodedT]):
    """Encoder-decoder model that encodes a source once and keeps it while slots refer to it.

    Args:
        kind: name in messages.
        num_layers: number of layers, all with attention.
        pool: the slots.
    """

    def __init__(self, kind: str, *, num_layers: int, pool: SlotPool) -> None:
        super().__init__(kind, num_layers=num_layers, pool=pool)
        self._encoded: dict[Source, EncodedT] = {}
        self._source_of: dict[int, EncodedT] = {}
        """Source of each open slot, by its index."""

    @abstractmethod
    def _encode(self, source: Source) -> Tensor:
        """Return the encoder's output, shape (1, length, features)."""

    @abstractmethod
    def _keep(self, source: Source, hidden: Tensor) -> EncodedT:
        """Return a source with the keys and values of the encoder's output."""

    @property
    def num_sources(self) -> int:
        """Number of encoded sources that slots refer to."""
        return len(self._encoded)

    def source_length(self, source: Source) -> int:
        """Return the number of positions of a source after the encoder."""
        if isinstance(source, HiddenSource):
            return int(source.hidden.shape[1])
        return self.max_source_length if isinstance(source, FeatureSource) else len(source.tokens)

    def open(self) -> KVSlot:
        """Raise: a slot needs a source."""
        EncoderDecoder.open(self)
        raise AssertionError("not reached")

    @torch.inference_mode()
    def open_on(self, source: Source) -> KVSlot:
        """Return an empty slot on a source; the encoder runs for a source that no open slot refers to."""
        require_source(source, self.feature_shape, kind=self.kind)
        known = self._encoded.get(source)
        if known is None:
            hidden = source.hidden if isinstance(source, HiddenSource) else self._encode(source)
            known = self._encoded[source] = self._keep(source, hidden)
        slot = self._pool.open()
        self._refer(slot.index, known)
        return slot

    def _refer(self, index: int, source: EncodedT) -> None:
        source.num_slots += 1
        self._source_of[index] = source

    def _leave(self, index: int) -> None:
        source = self._source_of.pop(index)
        source.num_slots -= 1
        if not source.num_slots:
            del self._encoded[source.source]

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """Apply edits; forks refer to the source of their slot, and closed slots to none."""
        before = [(edit, kv_slot(edit.slot).index) for edit in edits if isinstance(edit, (Fork, Close))]
        opened = super().apply(edits)
        new = iter(opened)
        for edit, index in before:
            if isinstance(edit, Fork):
                self._refer(kv_slot(next(new)).index, self._source_of[index])
            else:
                self._leave(index)
        return opened

    def check_integrity(self) -> None:
        """Raise AssertionError unless every open slot has a source, and every source a slot."""
        super().check_integrity()
        assert len(self._source_of) == self.num_open, "every open slot has a source"
        counts = [sum(one is source for one in self._source_of.values()) for source in self._encoded.values()]
        assert counts == [source.num_slots for source in self._encoded.values()], "references are counted"
        assert all(counts), "a source without slots is dropped"

    def require_part(self, part: LayerSubset, *, whole: LanguageModel | None = None) -> None:
        """Raise: no part of the decoder runs alone."""
        raise UnsupportedModelError(f"{self.kind} {WITHOUT_PARTS}")

    def require_capture(self, layers: Sequence[int]) -> None:
        """Raise if hidden states are wanted."""
        if layers:
            raise UnsupportedModelError(f"{self.kind} {WITHOUT_PARTS}")
