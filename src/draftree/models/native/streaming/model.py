"""Model whose native forward passes read some of its layers from a file, within a memory budget."""

from __future__ import annotations

import atexit
import logging
import mmap
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.core.host import BYTE_UNITS
from draftree.models.kv.slots import KVMemory, LayerRange, RangeOutput
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.decoder import NativeDecoder, Rows
from draftree.models.native.library import FORMATS, Library, library
from draftree.models.native.model import NativeModel
from draftree.models.native.packed import huge_pages
from draftree.models.native.streaming.store import (
    PRODUCTS,
    Extent,
    LayerReader,
    WeightFile,
    WeightStore,
    field_values,
    products_of,
    set_structures,
)
from draftree.models.native.structures import CDecoder, CLayer

logger = logging.getLogger(__name__)

_ending = threading.Event()
_threads = weakref.WeakSet[threading.Thread]()


class MappedFile:
    """Mapped file of packed weights; its memory stays valid as long as a tensor of it exists.

    Pages of the system's cache need no copy, so a start takes no longer than comparing checksums. Copies are worth
    their time in longer use: address translation of small pages takes a tenth of a pass.
    """

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        try:
            with open(file.path, "rb") as opened:
                self._memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"'{file.path}' cannot be mapped: {error}") from error
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def checked(self, extent: Extent, place: Tensor | None = None) -> Tensor:
        """Return the bytes of a layer after their checksum was compared, shape (size,), uint8."""
        end = extent.start + extent.size
        with memoryview(self._memory) as whole, whole[extent.start : end] as content:
            self._file.verify(extent, content)
        return self._bytes[extent.start : end]

    def release(self, extent: Extent) -> None:
        """Let the process forget the pages of a layer; a later read finds them again in the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, extent.start, extent.size)

    def read_at_random(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED)
            self._memory.madvise(mmap.MADV_RANDOM)


def copy_in_background(weights: StreamedWeights, count: int) -> threading.Thread:
    """Start a thread that copies the first `count` layers and closes the file; it ends once `weights` is unused."""
    thread = threading.Thread(target=_copy, args=(weakref.ref(weights), count), name="draftree-weights", daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@atexit.register
def _end_threads() -> None:
    # the interpreter would end threads inside calls of C++, which aborts the process
    _ending.set()
    for thread in list(_threads):
        thread.join()


def _copy(reference: weakref.ref[StreamedWeights], count: int) -> None:
    for layer in range(count):
        weights = reference()
        if weights is None or _ending.is_set():
            return
        try:
            weights.copy_layer(layer)
        except (ModelLoadError, MemoryError, RuntimeError) as error:
            logger.info("layers stay mapped, so that passes are slower: %s", error)
            break
        del weights
    if (weights := reference()) is not None:
        weights.close()


NUM_BUFFERS = 2
"""Least number of layers in memory besides those that stay there: one that computes and one that is read."""


class BudgetError(ConfigurationError):
    """The memory is too small for a model whose weights are streamed."""


@dataclass(frozen=True, slots=True)
class Placement:
    resident: tuple[int, ...]  # layers that stay in memory, ascending
    streamed: tuple[int, ...]  # layers that are read from the file in every pass, ascending
    num_buffers: int  # layers that fit into memory besides the resident ones
    memory: int  # bytes of all weights in memory, buffers included


def place(sizes: Sequence[int], *, fixed: int, budget: int) -> Placement:
    """Choose the layers that stay in memory: as many as fit beside two buffers, spread evenly over the model.

    Between two streamed layers there is then about equally much to compute, so reading rarely waits for a buffer.
    `fixed` bytes are always in memory: norms, the output head, scales.
    """
    count, largest = len(sizes), max(sizes)
    if fixed + sum(sizes) <= budget:
        return Placement(tuple(range(count)), (), 0, fixed + sum(sizes))
    buffers = NUM_BUFFERS * largest
    if fixed + buffers > budget:
        raise BudgetError(
            f"offload is {budget} bytes, which is too little for this model: its head and {NUM_BUFFERS} layers need "
            f"{fixed + buffers} bytes ({readable(fixed + buffers)})"
        )
    num_resident = min((budget - fixed - buffers) // largest, count - 1)
    resident = tuple(index * count // num_resident for index in range(num_resident)) if num_resident else ()
    streamed = tuple(layer for layer in range(count) if layer not in set(resident))
    num_buffers = min(NUM_BUFFERS, len(streamed))
    memory = fixed + num_buffers * largest + sum(sizes[layer] for layer in resident)
    return Placement(resident, streamed, num_buffers, memory)


def readable(size: int) -> str:
    unit = "GB" if size >= BYTE_UNITS["GB"] else "MB" if size >= BYTE_UNITS["MB"] else "KB"
    return f"{-(-size * 100 // BYTE_UNITS[unit]) / 100:g}{unit}"


@dataclass(frozen=True, slots=True)
class StreamStats:
    memory: int  # bytes of weights in memory, buffers included
    file: int  # bytes of all weights in the file
    of_pass: int  # bytes that a whole pass reads
    read: int  # bytes that were read for passes so far, layers that were read ahead included
    resident_layers: int  # layers that stay in memory
    streamed_layers: int  # layers that every pass reads


LEAST_MAPPED = 64 << 20  # least size of a file in bytes whose layers are mapped at first


class StreamedWeights:
    """Packed weights of a store within a memory budget, in the structures of the C library.

    Args:
        budget: bytes for all weights in memory; None for enough, with reads through the system's page cache. Layers of
            a large file are then mapped, until `start_copying`.
    """

    def __init__(self, library: Library, store: WeightStore, budget: int | None) -> None:
        self._library, self._store = library, store
        self._is_resident = budget is None
        self.biases: tuple[Tensor, ...] = ()
        fixed = store.tail.size + sum(tensor.numel() * tensor.element_size() for tensor in store.small)
        sizes = [extent.size for extent in store.extents]
        room = fixed + sum(sizes) if budget is None else budget
        # the layers in memory and those that are read
        self.placement: Placement = place(sizes, fixed=fixed, budget=room)
        self.file = WeightFile(store.file, is_cached=budget is None)
        is_mapped = budget is None and store.num_bytes >= LEAST_MAPPED
        self._map = MappedFile(self.file) if is_mapped else None
        self._embedding = None
        if store.embedding is not None:  # mapped: passes read few of its rows
            mapped = MappedFile(self.file)
            self._embedding = mapped.checked(store.embedding)
            mapped.read_at_random()
        resident = self.placement.resident
        extents = [store.extents[layer] for layer in resident]
        # one piece of memory for all: huge pages of single layers would be partly empty
        parts = [store.tail.size, *(extent.size for extent in extents)]
        places = huge_pages(sum(parts)).split(parts)
        self._places = dict(zip(resident, places[1:], strict=True))
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # a checksum takes as long as a read
            tail = pool.submit(self._read, store.tail, places[0])
            buffers = pool.map(self._read if self._map is None else self._map.checked, extents, places[1:])
            self._resident = dict(zip(resident, buffers, strict=True))
            self._tail = tail.result()
        # those of its layers. Products of a streamed layer are valid inside `loaded` only
        self.layers = (CLayer * len(store.layers))(
            *(CLayer(**field_values(CLayer, fields, self._address)) for fields in store.layers)
        )
        self._structures = [
            set_structures(layer, fields, self._address)
            for layer, fields in zip(self.layers, store.layers, strict=True)
        ]
        self.decoder = CDecoder(layers=self.layers, **field_values(CDecoder, store.decoder, self._address))
        # place of each product in its layer; until now, the address of a product is its place in the file
        self._relative = [
            [(product.weight or 0) - extent.start for product in products_of(layer)]
            for layer, extent in zip(self.layers, store.extents, strict=True)
        ]
        for layer, buffer in self._resident.items():
            self._point(layer, buffer)
        streamed = self.placement.streamed
        extents = [store.extents[layer] for layer in streamed]
        self._index = {layer: index for index, layer in enumerate(streamed)}
        self._reader = LayerReader(self.file, extents, self.placement.num_buffers) if streamed else None
        self._start_bytes = self.file.num_bytes  # read when the model was loaded
        if budget is None:
            weakref.finalize(self, self.file.close)
            if self._map is None:
                self.file.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of weights in memory, buffers included."""
        return self._store.packed_bytes if self._is_resident else self.placement.memory

    @property
    def stats(self) -> StreamStats:
        placed = self.placement
        return StreamStats(
            memory=self.num_bytes,
            file=self._store.num_bytes,
            of_pass=sum(self._store.extents[layer].size for layer in placed.streamed),
            read=self.file.num_bytes - self._start_bytes,
            resident_layers=len(placed.resident),
            streamed_layers=len(placed.streamed),
        )

    @contextmanager
    def loaded(self, layer: int) -> Iterator[None]:
        """Keep the products of a layer in memory inside the block; the reader reads the next streamed layers."""
        if self._reader is None or layer in self._resident:
            yield
            return
        index = self._index[layer]
        self._point(layer, self._reader.take(index))
        try:
            yield
        finally:
            self._reader.release(index)

    def at(self, address: int | None) -> Tensor | None:
        """Return the tensor in memory at an address; None for no address."""
        if address is None:
            return None
        plan = self.decoder
        if address == plan.embedding:
            assert self._embedding is not None, "the model has a separate embedding"
            kind = torch.float32 if plan.kv_format == FORMATS["float32"] else torch.bfloat16
            return self._embedding[: plan.vocab * plan.hidden * kind.itemsize].view(kind).view(plan.vocab, plan.hidden)
        return next(tensor for tensor in self._store.small if tensor.data_ptr() == address)

    def start_copying(self) -> threading.Thread | None:
        """Let a thread copy mapped layers to huge pages, and return it; None if there are none."""
        return None if self._map is None else copy_in_background(self, len(self._resident))

    def copy_layer(self, layer: int) -> None:
        """Copy a mapped layer to huge pages; passes that run meanwhile read the same bytes from either place."""
        extent = self._store.extents[layer]
        self._resident[layer] = self._read(extent, self._places[layer])
        self._point(layer, self._resident[layer])
        if self._map is not None:
            self._map.release(extent)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        else:
            self.file.close()

    def _read(self, extent: Extent, buffer: Tensor) -> Tensor:
        self.file.read(extent, buffer)
        return buffer

    def _address(self, place: Mapping[str, int]) -> int:
        """Return the address of what a field of the store points at; of a layer's product, its place in the file."""
        if "tensor" in place:
            return self._store.small[place["tensor"]].data_ptr()
        at = place["at"]
        if at < self._store.tail.start:
            return at
        embedding = self._store.embedding
        if self._embedding is not None and embedding is not None and at == embedding.start:
            return self._embedding.data_ptr()
        return self._tail.data_ptr() + at - self._store.tail.start

    def _point(self, layer: int, buffer: Tensor) -> None:
        first = buffer.data_ptr()
        for product, offset in zip(products_of(self.layers[layer]), self._relative[layer], strict=True):
            product.weight = first + offset


PASSES_BEFORE_COPY = 32
"""Passes before mapped weights are copied: a copy takes as long as some 4 passes, and makes them faster by a tenth."""


@final
class StreamedDecoder(NativeDecoder):
    """Decoder whose pass waits for each layer."""

    def __init__(self, blueprint: Blueprint, weights: StreamedWeights, *, quantization: str | None = None) -> None:
        super().__init__(blueprint, weights, quantization=quantization)
        self._streamed = weights
        self._unpacked_layer = -1
        self._unpacked: dict[str, tuple[Tensor, Tensor | None]] = {}

    def decode(self, *args: Any, **options: Any) -> list[list[int]]:
        return []  # each layer is awaited

    def run(
        self,
        memory: KVMemory | None,
        rows: Rows,
        logit_rows: Sequence[int],
        *,
        layer_range: LayerRange,
        features: Tensor | None = None,
        **options: Any,
    ) -> RangeOutput:
        hidden, captured = layer_range.hidden, list[Tensor]()
        ascending = sorted(layer_range.capture)
        for layer in range(layer_range.first, layer_range.end):
            is_last = layer + 1 == layer_range.end
            part = replace(
                layer_range,
                first=layer,
                end=layer + 1,
                hidden=hidden,
                keeps_hidden=layer_range.keeps_hidden or not is_last,
                # the output of the last layer is captured with it
                capture=tuple(at for at in ascending if at == layer or (is_last and at == layer + 1)),
            )
            is_first = layer == layer_range.first
            with self._streamed.loaded(layer):
                output = super().run(
                    memory,
                    rows,
                    logit_rows if is_last else (),
                    layer_range=part,
                    features=features if is_first else None,
                    **options,
                )
            hidden = None if output.hidden is None else output.hidden.contiguous()
            if output.captured is not None:
                captured.append(output.captured)
        in_order = None
        if captured:
            in_order = torch.cat(captured, dim=1)[:, [ascending.index(layer) for layer in layer_range.capture]]
        return RangeOutput(output.logits, hidden if layer_range.keeps_hidden else None, in_order)

    def product_weight(self, layer: int, name: str, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of a layer's product; a streamed layer is read once for all of its products."""
        if layer != self._unpacked_layer or name not in self._unpacked:
            with self._streamed.loaded(layer):
                latents = (f"latents.{index}" for index in range(self.packed.layers[layer].num_latents))
                parts = (*PRODUCTS, *latents)
                self._unpacked = {part: NativeDecoder.product_weight(self, layer, part, dtype) for part in parts}
            self._unpacked_layer = layer
        return self._unpacked.pop(name)


@final
class ResidentDecoder(NativeDecoder):
    """Decoder over weights in memory, whose first passes use mapped ones: they wait for no copy."""

    def __init__(self, blueprint: Blueprint, weights: StreamedWeights, *, quantization: str | None = None) -> None:
        super().__init__(blueprint, weights, quantization=quantization)
        self._resident = weights
        self._passes_before_copy = PASSES_BEFORE_COPY
        self._copying: threading.Thread | None = None

    def run(self, *args: Any, **options: Any) -> RangeOutput:
        output = super().run(*args, **options)
        self._count(1)
        return output

    def decode(self, *args: Any, **options: Any) -> list[list[int]]:
        tokens = super().decode(*args, **options)
        self._count(len(tokens))
        return tokens

    def _count(self, num_passes: int) -> None:
        left, self._passes_before_copy = self._passes_before_copy, self._passes_before_copy - num_passes
        if left > 0 >= self._passes_before_copy:
            self._copying = self._resident.start_copying()

    def settle(self) -> None:
        if self._passes_before_copy > 0:
            self._passes_before_copy = 0
            self._copying = self._resident.start_copying()
        if self._copying is not None:
            self._copying.join()


def resident_model(blueprint: Blueprint, store: WeightStore, *, quantization: str | None) -> NativeModel:
    decoder = ResidentDecoder(blueprint, StreamedWeights(library(), store, None), quantization=quantization)
    return NativeModel(blueprint, decoder, quantization=quantization)


@final
class StreamedModel(NativeModel):
    """Model with packed weights in a file, of which `budget` bytes are in memory."""

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
        return self._weights.file.is_direct

    @property
    def stream_stats(self) -> StreamStats:
        return self._weights.stats
