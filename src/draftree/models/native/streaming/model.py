"""Model whose passes run in C and read some of its layers from a file, within a memory budget.

A pass runs layer by layer: while one layer computes, a thread reads the next streamed ones. Its logits have the same
bits as those of a model in memory. Reading takes most of the time of a pass over few rows, so a pass over many rows
costs hardly more, and large trees pay.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from draftree.models.kv.partial import LayerRange, RangeOutput
from draftree.models.kv.slots import KVMemory
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.decoder import NativeDecoder
from draftree.models.native.library import library
from draftree.models.native.model import NativeModel
from draftree.models.native.rows import Rows, SourceRows
from draftree.models.native.streaming.store import WeightStore
from draftree.models.native.streaming.structures import PRODUCTS
from draftree.models.native.streaming.weights import StreamedWeights

PASSES_BEFORE_COPY = 32
"""Passes before mapped weights are copied: a copy takes as long as some 4 passes, and makes them faster by a tenth."""


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Counters of streamed weights.

    Attributes:
        memory: bytes of weights in memory, buffers included.
        file: bytes of all weights in the file.
        of_pass: bytes that a whole pass reads.
        read: bytes that were read for passes so far, layers that were read ahead included.
        resident_layers: layers that stay in memory.
        streamed_layers: layers that every pass reads.
    """

    memory: int
    file: int
    of_pass: int
    read: int
    resident_layers: int
    streamed_layers: int


@final
class StreamedDecoder(NativeDecoder):
    """Decoder whose pass waits for each layer.

    Args:
        blueprint: architecture of the model.
        weights: its weights.
        quantization: "int8" for 8-bit weights, None for the model's dtype.
    """

    def __init__(self, blueprint: Blueprint, weights: StreamedWeights, *, quantization: str | None = None) -> None:
        super().__init__(blueprint, weights, quantization=quantization)
        self._streamed = weights
        self._unpacked_layer = -1
        self._unpacked: dict[str, tuple[Tensor, Tensor | None]] = {}

    def run(
        self,
        memory: KVMemory | None,
        rows: Rows,
        logit_rows: Sequence[int],
        *,
        layer_range: LayerRange,
        features: Tensor | None = None,
        rope_positions: Sequence[int] | None = None,
        sources: SourceRows | None = None,
    ) -> RangeOutput:
        """Run one pass over rows, one layer after the other; arguments as for `NativeDecoder.run`."""
        assert sources is None, "weights of encoder-decoder models stay in memory"
        hidden, captured = layer_range.hidden, list[Tensor]()
        for layer in range(layer_range.first, layer_range.end):
            is_last = layer + 1 == layer_range.end
            part = _layer_of(layer_range, layer, hidden, is_last=is_last)
            with self._streamed.loaded(layer):
                output = super().run(
                    memory,
                    rows,
                    logit_rows if is_last else (),
                    layer_range=part,
                    features=features if layer == layer_range.first else None,
                    rope_positions=rope_positions,
                )
            hidden = None if output.hidden is None else output.hidden.contiguous()
            if output.captured is not None:
                captured.append(output.captured)
        return RangeOutput(
            output.logits,
            hidden if layer_range.keeps_hidden else None,
            _in_order(layer_range, captured) if layer_range.capture else None,
        )

    def product_weight(self, layer: int, name: str, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of a layer's product; a streamed layer is read once for all of its products."""
        if layer != self._unpacked_layer or name not in self._unpacked:
            with self._streamed.loaded(layer):
                self._unpacked = {part: NativeDecoder.product_weight(self, layer, part, dtype) for part in PRODUCTS}
            self._unpacked_layer = layer
        return self._unpacked.pop(name)


@final
class ResidentDecoder(NativeDecoder):
    """Decoder over weights in memory, whose first passes use mapped ones: they wait for no copy.

    Args:
        blueprint: architecture of the model.
        weights: its weights, none of which are streamed.
        quantization: as for `NativeDecoder`.
    """

    def __init__(self, blueprint: Blueprint, weights: StreamedWeights, *, quantization: str | None = None) -> None:
        super().__init__(blueprint, weights, quantization=quantization)
        self._resident = weights
        self._passes_before_copy = PASSES_BEFORE_COPY
        self._copying: threading.Thread | None = None

    def run(self, *args: Any, **options: Any) -> RangeOutput:
        """Run one pass; arguments as for `NativeDecoder.run`."""
        output = super().run(*args, **options)
        self._passes_before_copy -= 1
        if self._passes_before_copy == 0:
            self._copying = self._resident.start_copying()
        return output

    def settle(self) -> None:
        """Copy mapped layers and wait for the end of it."""
        if self._passes_before_copy > 0:
            self._passes_before_copy = 0
            self._copying = self._resident.start_copying()
        if self._copying is not None:
            self._copying.join()


def resident_model(blueprint: Blueprint, store: WeightStore, *, quantization: str | None) -> NativeModel:
    """Return a model whose packed weights stay in memory, large ones mapped in the first passes.

    Raises:
        ModelLoadError: the file is damaged or unreadable.
        NativeUnavailableError: the native kernels are unavailable.
    """
    decoder = ResidentDecoder(blueprint, StreamedWeights(library(), store, None), quantization=quantization)
    return NativeModel(blueprint, decoder, quantization=quantization)


def _layer_of(whole: LayerRange, layer: int, hidden: Tensor | None, *, is_last: bool) -> LayerRange:
    """Return the range of one layer of a pass; the output of the last layer is captured with it."""
    wanted = [at for at in sorted(whole.capture) if at == layer or (is_last and at == layer + 1)]
    return replace(
        whole,
        first=layer,
        end=layer + 1,
        hidden=hidden,
        keeps_hidden=whole.keeps_hidden or not is_last,
        capture=tuple(wanted),
    )


def _in_order(whole: LayerRange, captured: Sequence[Tensor]) -> Tensor:
    """Return captured states in the order of the request; they were captured by ascending layers."""
    ascending = sorted(whole.capture)
    joined = torch.cat(list(captured), dim=1)
    return joined[:, [ascending.index(layer) for layer in whole.capture]]


@final
class StreamedModel(NativeModel):
    """Model with packed weights in a file.

    Args:
        blueprint: architecture of the model.
        store: its packed weights.
        budget: bytes for all weights in memory.
        quantization: "int8" for 8-bit weights, None for the model's dtype.

    Raises:
        ConfigurationError: the budget is too small.
        ModelLoadError: the file is damaged or unreadable.
        NativeUnavailableError: the native kernels are unavailable.
    """

    streams_weights = True

    def __init__(
        self, blueprint: Blueprint, store: WeightStore, *, budget: int, quantization: str | None = None
    ) -> None:
        self._weights = StreamedWeights(library(), store, budget)
        weakref.finalize(self, self._weights.close)
        decoder = StreamedDecoder(blueprint, self._weights, quantization=quantization)
        super().__init__(blueprint, decoder, quantization=quantization)

    @property
    def reads_directly(self) -> bool:
        """Whether the file is read past the system's page cache."""
        return self._weights.reads_directly

    @property
    def stream_stats(self) -> StreamStats:
        """Memory and reads of the weights."""
        weights, placed = self._weights, self._weights.placement
        return StreamStats(
            weights.num_bytes,
            weights.file_bytes,
            weights.pass_bytes,
            weights.bytes_read,
            len(placed.resident),
            len(placed.streamed),
        )
