"""Packed weights of which some layers are read from their file in every pass."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.models.native.huge_pages import huge_pages
from draftree.models.native.library import LANES, Library
from draftree.models.native.streaming.budget import Placement, place
from draftree.models.native.streaming.mapped import MappedFile, copy_in_background
from draftree.models.native.streaming.reader import Extent, LayerReader, WeightFile
from draftree.models.native.streaming.store import WeightStore
from draftree.models.native.streaming.structures import (
    decoder_of,
    experts_of,
    layer_of,
    places_of,
    products_of,
)
from draftree.models.native.structures import CLayer, CLinear
from draftree.models.native.unpacking import TYPES

LEAST_MAPPED = 64 << 20
"""Least size of a file in bytes whose layers are mapped at first."""


class StreamedWeights:
    """Packed weights of a store within a memory budget, in the structures of the C library.

    Args:
        library: the C library.
        store: the packed weights.
        budget: bytes for all weights in memory; None for enough, with reads through the system's page cache. Layers of
            a large file are then mapped, until `start_copying`.

    Attributes:
        decoder: the structure of the model.
        layers: those of its layers. Products of a streamed layer are valid inside `loaded` only.
        placement: the layers in memory and those that are read.

    Raises:
        ConfigurationError: the budget is too small.
        ModelLoadError: the file is damaged or unreadable.
    """

    def __init__(self, library: Library, store: WeightStore, budget: int | None) -> None:
        self._library, self._store = library, store
        self._is_resident = budget is None
        self.biases: tuple[Tensor, ...] = ()
        fixed = store.tail.size + sum(tensor.numel() * tensor.element_size() for tensor in store.small)
        sizes = [extent.size for extent in store.extents]
        room = fixed + sum(sizes) if budget is None else budget
        self.placement: Placement = place(sizes, fixed=fixed, budget=room)
        self._file = WeightFile(store.file, is_cached=budget is None)
        is_mapped = budget is None and store.num_bytes >= LEAST_MAPPED
        self._map = MappedFile(self._file) if is_mapped else None
        self._embedding = None if store.embedding is None else self._mapped(store.embedding)
        resident = self.placement.resident
        extents = [store.extents[layer] for layer in resident]
        # one piece of memory for all: huge pages of single layers would be partly empty
        places = huge_pages(store.tail.size + sum(extent.size for extent in extents)).split(
            [store.tail.size, *(extent.size for extent in extents)]
        )
        self._places = dict(zip(resident, places[1:], strict=True))
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # a checksum takes as long as a read
            tail = pool.submit(self._read, store.tail, places[0])
            buffers = pool.map(self._read if self._map is None else self._map.checked, extents, places[1:])
            self._resident = dict(zip(resident, buffers, strict=True))
            self._tail = tail.result()
        self.layers = (CLayer * len(store.layers))(*(layer_of(fields, self._address) for fields in store.layers))
        self._experts = [experts_of(fields, self._address) for fields in store.layers]
        for layer, experts in zip(self.layers, self._experts, strict=True):
            layer.experts = None if experts is None else ctypes.addressof(experts)
        self.decoder = decoder_of(store.decoder, self.layers, self._address)
        self._relative = [
            [place - extent.start for place in places_of(fields)]
            for fields, extent in zip(store.layers, store.extents, strict=True)
        ]
        for layer, buffer in self._resident.items():
            self._point(layer, buffer)
        streamed = self.placement.streamed
        extents = [store.extents[layer] for layer in streamed]
        self._index = {layer: index for index, layer in enumerate(streamed)}
        self._reader = LayerReader(self._file, extents, self.placement.num_buffers) if streamed else None
        self.start_bytes = self._file.num_bytes
        """Bytes read when the model was loaded."""
        if budget is None:
            weakref.finalize(self, self._file.close)
            if self._map is None:
                self._file.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of weights in memory, buffers included."""
        return self._store.packed_bytes if self._is_resident else self.placement.memory

    @property
    def reads_directly(self) -> bool:
        """Whether the file is read past the system's page cache."""
        return self._file.is_direct

    @property
    def file_bytes(self) -> int:
        """Bytes of all packed weights in the file."""
        return self._store.num_bytes

    @property
    def pass_bytes(self) -> int:
        """Bytes that a whole pass reads from the file."""
        return sum(self._store.extents[layer].size for layer in self.placement.streamed)

    @property
    def bytes_read(self) -> int:
        """Bytes that passes have read from the file so far, read ahead included."""
        return self._file.num_bytes - self.start_bytes

    @contextmanager
    def loaded(self, layer: int) -> Iterator[None]:
        """Keep the products of a layer in memory inside the block; the reader reads the next streamed layers.

        Raises:
            ModelLoadError: the file is damaged or unreadable.
        """
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
        """Return the tensor in memory at an address; None for no address.

        Raises:
            LookupError: there is none, such as for a streamed product.
        """
        if address is None:
            return None
        plan, head = self.decoder, self.decoder.head
        if address == head.weight:
            size = -(-head.outputs // LANES) * self._library.block_bytes(head.inputs, head.format)
            return self._tail[:size]
        if address == plan.embedding:
            assert self._embedding is not None, "the model has a separate embedding"
            kind = TYPES[plan.kv_format]
            return self._embedding[: plan.vocab * plan.hidden * kind.itemsize].view(kind).view(plan.vocab, plan.hidden)
        found = next((tensor for tensor in self._store.small if tensor.data_ptr() == address), None)
        if found is None:
            raise LookupError("no tensor is kept in memory at this address")
        return found

    def product(self, layer: int, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a copy of the packed blocks of a layer's product, and their scales; inside `loaded` only."""
        linear: CLinear = getattr(self.layers[layer], name)
        size = -(-linear.outputs // LANES) * self._library.block_bytes(linear.inputs, linear.format)
        blocks = (ctypes.c_uint8 * size).from_address(linear.weight)
        return torch.frombuffer(bytearray(blocks), dtype=torch.uint8), self.at(linear.scale)

    def start_copying(self) -> threading.Thread | None:
        """Let a thread copy mapped layers to huge pages, and return it; None if there are none."""
        return None if self._map is None else copy_in_background(self, len(self._resident))

    def copy_layer(self, layer: int) -> None:
        """Copy a mapped layer to huge pages; passes that run meanwhile read the same bytes from either place.

        Raises:
            ModelLoadError: the file cannot be read any more; the layer stays mapped.
        """
        extent = self._store.extents[layer]
        self._resident[layer] = self._read(extent, self._places[layer])
        self._point(layer, self._resident[layer])
        if self._map is not None:
            self._map.release(extent)

    def close(self) -> None:
        """Stop reading and close the file."""
        if self._reader is not None:
            self._reader.close()
        else:
            self._file.close()

    def _read(self, extent: Extent, buffer: Tensor) -> Tensor:
        self._file.read(extent, buffer)
        return buffer

    def _mapped(self, extent: Extent) -> Tensor:
        """Return the embedding as mapped memory: passes read few of its rows."""
        with open(self._store.file, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        with memoryview(memory) as view:
            if zlib.crc32(view[extent.start : extent.start + extent.size]) != extent.checksum:
                raise ModelLoadError(f"'{self._store.file}' is damaged: delete its folder, and it is written again")
        if hasattr(mmap, "MADV_DONTNEED"):
            memory.madvise(mmap.MADV_DONTNEED)
            memory.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(memory, dtype=torch.uint8)[extent.start : extent.start + extent.size]

    def _address(self, place: Mapping[str, int]) -> int:
        """Return the address of what a field of the store points at; 0 for products, which are set later."""
        if "tensor" in place:
            return self._store.small[place["tensor"]].data_ptr()
        at = place["at"]
        if at < self._store.tail.start:
            return 0
        embedding = self._store.embedding
        if self._embedding is not None and embedding is not None and at == embedding.start:
            return int(self._embedding.data_ptr())
        return int(self._tail.data_ptr()) + at - self._store.tail.start

    def _point(self, layer: int, buffer: Tensor) -> None:
        first = buffer.data_ptr()
        for product, offset in zip(products_of(self.layers[layer]), self._relative[layer], strict=True):
            product.weight = first + offset
