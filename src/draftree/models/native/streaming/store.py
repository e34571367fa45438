"""Folder with the packed weights of one model: a file that is read layer by layer, small tensors, a description."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import os
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.core.files import MALFORMED, read_json, write_json
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.library import Library, format_of
from draftree.models.native.packed import PAGE, PackedWeights, huge_pages
from draftree.models.native.packing import bytes_needed
from draftree.models.native.structures import (
    CDecoder,
    CExperts,
    CLatent,
    CLayer,
    CLinear,
    CRecurrence,
    expert_products,
    latents_of,
)
from draftree.models.native.weights import Weights

PRODUCTS = ("qkv", "output", "gate_up", "down")
EXPERT_PRODUCTS = ("gate_up", "down")
SET_BY_PASSES = ("keys", "values", "states", "stored")  # pointers of a layer that every memory of slots sets
AddressOf = Callable[[Mapping[str, int]], int]


def layout() -> dict[str, list[str]]:
    """Return the fields of a description; those of another version of the package may differ."""
    kinds = (CDecoder, CLayer, CRecurrence, CLatent, CExperts, CLinear)
    return {kind.__name__: [entry[0] for entry in kind._fields_] for kind in kinds}


def exported(structure: ctypes.Structure, place_of: Callable[[int], Mapping[str, int]]) -> dict[str, Any]:
    """Return the fields of a structure; `place_of` describes what an address points at."""
    fields: dict[str, Any] = {}
    for name, kind in ((entry[0], entry[1]) for entry in structure._fields_):
        value = getattr(structure, name)
        if name in (*SET_BY_PASSES, "layers"):
            continue
        if isinstance(value, ctypes.Structure):
            value = exported(value, place_of)
        elif isinstance(structure, CExperts) and name in EXPERT_PRODUCTS:
            value = [exported(linear, place_of) for linear in expert_products(structure, name)]
        elif value is not None and name == "latents":
            value = [exported(latent, place_of) for latent in latents_of(cast(CLayer, structure))]
        elif value is not None and name == "experts":
            value = exported(CExperts.from_address(value), place_of)
        elif value is not None and name == "recurrence":
            value = exported(CRecurrence.from_address(value), place_of)
        elif value is not None and kind is ctypes.c_void_p:
            value = place_of(value)
        fields[name] = value
    return fields


def set_structures(layer: CLayer, fields: Mapping[str, Any], address_of: AddressOf) -> list[Any]:
    """Set the structures of experts, recurrence and latents of a layer, if it has them; return them, to be kept."""

    def array(kind: Any, each: Sequence[Mapping[str, Any]]) -> Any:
        kept.append((kind * len(each))(*(kind(**field_values(kind, one, address_of)) for one in each)))
        return ctypes.addressof(kept[-1])

    kept: list[Any] = []
    if (experts := fields["experts"]) is not None:
        layer.experts = array(CExperts, [experts])
        for name in EXPERT_PRODUCTS:
            setattr(kept[0][0], name, array(CLinear, experts[name]))
    if fields["recurrence"] is not None:
        layer.recurrence = array(CRecurrence, [fields["recurrence"]])
    if fields["latents"] is not None:
        layer.latents = array(CLatent, fields["latents"])
    return kept


def products_of(layer: CLayer) -> list[CLinear]:
    """Return all products of a layer that lie in its part of the file, as views of its structures."""
    products = [getattr(layer, name) for name in PRODUCTS]
    latents = [latent.product for latent in latents_of(layer)]
    if layer.experts is not None:
        experts = CExperts.from_address(layer.experts)
        each = [linear for name in EXPERT_PRODUCTS for linear in expert_products(experts, name)]
        products = [layer.qkv, layer.output, experts.router, *each]
    return [product for product in (*products, *latents) if product.outputs]


def field_values(structure: type[ctypes.Structure], fields: Mapping[str, Any], address_of: AddressOf) -> dict[str, Any]:
    """Return the arguments of a structure from its exported fields, without layers and what these point to."""
    values: dict[str, Any] = {}
    for name, kind in ((entry[0], entry[1]) for entry in structure._fields_):
        if name in (*SET_BY_PASSES, "layers", "experts", "recurrence", "latents") or (
            structure is CExperts and name in EXPERT_PRODUCTS
        ):
            continue
        value = fields[name]
        if kind is CLinear:
            value = CLinear(**field_values(CLinear, value, address_of))
        elif kind is ctypes.c_void_p and value is not None:
            value = address_of(value)
        values[name] = value
    return values


PIECE = 8 << 20  # bytes per read: smaller ones do not use the full speed of a solid-state drive


@dataclass(frozen=True, slots=True)
class Extent:
    """Place of one layer in the file; start and size are multiples of a page."""

    start: int  # first byte
    size: int  # number of bytes
    checksum: int  # CRC-32 of the bytes


class WeightFile:
    """Open file of packed weights, read past the system's page cache where the file system supports that."""

    def __init__(self, path: Path, *, is_cached: bool = False) -> None:
        self.path = path
        self._is_cached = is_cached
        self.num_bytes = 0  # bytes read so far
        self._verified: set[int] = set()
        self._descriptor = -1
        if not is_cached and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # some file systems have no direct reads
                self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.is_direct = self._descriptor >= 0
        try:
            if not self.is_direct:
                self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ModelLoadError(f"'{path}' cannot be opened: {error.strerror}") from error

    def read(self, extent: Extent, buffer: Tensor) -> None:
        """Read a layer into the beginning of a buffer, and compare its checksum the first time."""
        view = buffer.numpy().data[: extent.size]
        done = 0
        try:
            while done < extent.size:
                count = os.preadv(self._descriptor, [view[done : done + PIECE]], extent.start + done)
                if not count:
                    raise ModelLoadError(f"'{self.path}' ends early: delete its folder, and it is written again")
                done += count
            if not (self.is_direct or self._is_cached) and hasattr(os, "posix_fadvise"):
                # these pages are not read again before all others
                os.posix_fadvise(self._descriptor, extent.start, extent.size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ModelLoadError(f"'{self.path}' cannot be read: {error.strerror}") from error
        self.num_bytes += extent.size
        self.verify(extent, view)

    def verify(self, extent: Extent, content: memoryview) -> None:
        """Compare the checksum of a layer with its content, the first time."""
        if extent.start not in self._verified:
            if zlib.crc32(content) != extent.checksum:
                raise ModelLoadError(f"'{self.path}' is damaged: delete its folder, and it is written again")
            self._verified.add(extent.start)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LayerReader:
    """Buffers that a thread fills with layers in cyclic order, ahead of their use.

    One thread takes and releases layers. The reader starts with the first `take`, so a model that is never run reads
    nothing.
    """

    def __init__(self, file: WeightFile, extents: Sequence[Extent], num_buffers: int) -> None:
        self._file, self._extents = file, extents
        largest = max(extent.size for extent in extents)
        self._free = deque(huge_pages(largest) for _ in range(num_buffers))
        self._ready: dict[int, Tensor] = {}
        self._in_use: dict[int, Tensor] = {}
        self._next = 0
        self._reading: int | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def take(self, index: int) -> Tensor:
        """Return the buffer with the layer of this index in `extents`; it is unchanged until `release`.

        Waits for the reader. A layer out of order discards what was read ahead.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the weights of this model were closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._read_ahead, name="draftree-weights", daemon=True)
                self._thread.start()
            if index not in self._ready and index not in (self._reading, self._next):
                self._free.extend(self._ready.values())
                self._ready.clear()
                self._next = index
                self._changed.notify_all()
            self._changed.wait_for(lambda: index in self._ready or self._error is not None)
            if self._error is not None:
                raise self._error
            self._in_use[index] = self._ready.pop(index)
            return self._in_use[index]

    def release(self, index: int) -> None:
        with self._changed:
            self._free.append(self._in_use.pop(index))
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread and close the file; buffers that are in use stay valid."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._file.close()

    def _read_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or bool(self._free))
                if self._is_closed:
                    return
                index, buffer = self._next, self._free.popleft()
                self._reading, self._next = index, (index + 1) % len(self._extents)
            try:
                self._file.read(self._extents[index], buffer)
            except BaseException as error:
                self._error = error
            with self._changed:
                self._reading = None
                self._changed.notify_all()
                if self._error is not None:
                    return
                if index in self._ready or index in self._in_use or self._next != (index + 1) % len(self._extents):
                    self._free.append(buffer)  # not the layer that is wanted any more
                else:
                    self._ready[index] = buffer


FORMAT = 5
WEIGHTS, SMALL, DESCRIPTION = "weights.bin", "small.safetensors", "description.json"


@dataclass(frozen=True, slots=True)
class WeightStore:
    """Open description of a folder of packed weights."""

    folder: Path
    decoder: Mapping[str, Any]  # fields of the model's structure, see `structures.py`
    layers: Sequence[Mapping[str, Any]]  # fields of its layers' structures
    extents: tuple[Extent, ...]  # places of the layers in the file
    tail: Extent  # place of the products after the layers: the output head and a projection
    embedding: Extent | None  # place of a separate embedding; None if passes read the output head
    small: tuple[Tensor, ...]  # small tensors
    packed_bytes: int  # size of all weights in memory in bytes, without padding
    facts: Mapping[str, Any]  # what the caller stored with them

    @property
    def num_bytes(self) -> int:
        last = self.tail if self.embedding is None else self.embedding
        return last.start + last.size

    @property
    def file(self) -> Path:
        return self.folder / WEIGHTS


def write_store(
    folder: Path, library: Library, blueprint: Blueprint, weights: Weights, *, quantization: str | None
) -> WeightStore:
    """Pack weights into a new folder, within a few layers of memory; `add_facts` completes it."""
    kind = format_of(quantization, blueprint.dtype)
    size = bytes_needed(blueprint, library, weights, kind=kind, page=PAGE)
    size += PAGE + blueprint.vocab * blueprint.hidden * (4 if blueprint.dtype == "float32" else 2)
    try:
        with open(folder / WEIGHTS, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises here, not as a fault in mapped memory
            with _Mapped(mmap.mmap(file.fileno(), size)) as mapped:
                packed = PackedWeights(
                    library, blueprint, weights, kind=kind, arena=mapped.bytes, after_layer=mapped.end
                )
                mapped.end(packed.used_bytes)
                description, small = _described(packed, mapped.extents.copy(), mapped.append)
                small = [tensor.clone() for tensor in small]
                del packed
            file.truncate(mapped.used_bytes)
            os.fsync(file.fileno())
        _write(folder, description, small)
    except OSError as error:
        raise ModelLoadError(f"packed weights cannot be written to '{folder}': {error.strerror}") from error
    return open_store(folder)


def save_store(folder: Path, packed: PackedWeights, facts: Mapping[str, Any]) -> None:
    content = packed.arena.numpy().data
    with open(folder / WEIGHTS, "wb") as file:

        def append(raw: memoryview, size: int) -> Extent:
            start = file.tell()
            file.write(raw)
            padding = bytes(size - len(raw))
            file.write(padding)
            return Extent(start, size, zlib.crc32(padding, zlib.crc32(raw)))

        ends = (*packed.layer_ends, packed.used_bytes)
        extents = [append(content[start:end], end - start) for start, end in pairwise((0, *ends))]
        description, small = _described(packed, extents, append)
    _write(folder, {**description, "facts": facts}, small)


def _described(
    packed: PackedWeights, extents: Sequence[Extent], append: Callable[[memoryview, int], Extent]
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the description of packed weights and the small tensors; `append` writes a separate embedding."""
    embedding: Extent | None = None
    places: dict[int, dict[str, int]] = {}
    small: list[Tensor] = []
    base = packed.arena.data_ptr()
    for tensor in packed.beside:
        if tensor.data_ptr() == packed.decoder.embedding:
            raw = tensor.contiguous().view(torch.uint8).flatten().numpy().data
            embedding = append(raw, -(-len(raw) // PAGE) * PAGE)
            places[tensor.data_ptr()] = {"at": embedding.start}
        else:
            places[tensor.data_ptr()] = {"tensor": len(small)}
            small.append(tensor)

    def place_of(address: int) -> dict[str, int]:
        return places.get(address) or {"at": address - base}

    *layers, tail = map(dataclasses.asdict, extents)
    description = {
        "decoder": exported(packed.decoder, place_of),
        "layers": [exported(layer, place_of) for layer in packed.layers],
        "extents": layers,
        "tail": tail,
        "embedding": None if embedding is None else dataclasses.asdict(embedding),
        "packed_bytes": packed.num_bytes,
    }
    return description, small


def add_facts(store: WeightStore, facts: Mapping[str, Any]) -> WeightStore:
    _write(store.folder, read_json(store.folder / DESCRIPTION) | {"facts": facts})
    return dataclasses.replace(store, facts=facts)


def open_store(folder: Path) -> WeightStore:
    """Open a folder of packed weights; reads no large tensor."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        description = read_json(folder / DESCRIPTION)
        if description["format"] != FORMAT:
            raise ValueError(f"its format is {description['format']}, expected {FORMAT}")
        if description.get("layout") != layout():
            raise ValueError("another version of the package wrote it")
        small = load_file(folder / SMALL)
        store = WeightStore(
            folder,
            decoder=description["decoder"],
            layers=description["layers"],
            extents=tuple(Extent(**extent) for extent in description["extents"]),
            tail=Extent(**description["tail"]),
            embedding=None if description["embedding"] is None else Extent(**description["embedding"]),
            small=tuple(small[str(number)] for number in range(len(small))),
            packed_bytes=description["packed_bytes"],
            facts=description.get("facts", {}),
        )
        if (size := store.file.stat().st_size) != store.num_bytes:
            raise ValueError(f"'{WEIGHTS}' has {size} bytes, expected {store.num_bytes}")
        return store
    except (OSError, SafetensorError, *MALFORMED) as error:
        raise ModelLoadError(f"'{folder}' holds no packed weights that can be used: {error}") from error


def publish(work: Path, place: Path) -> None:
    """Move a finished folder to its place, and replace what is there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        with tempfile.TemporaryDirectory(dir=place.parent, ignore_cleanup_errors=True) as old:
            place.rename(Path(old) / "replaced")
            work.rename(place)
    else:
        work.rename(place)


def _write(folder: Path, description: Mapping[str, Any], small: Sequence[Tensor] = ()) -> None:
    from safetensors.torch import save_file

    if small:
        save_file({str(number): tensor for number, tensor in enumerate(small)}, folder / SMALL)
    write_json(folder / DESCRIPTION, {"format": FORMAT, "layout": layout(), **description})


class _Mapped:
    """Mapped file into which weights are packed. Pages of finished layers are written and released."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.extents: list[Extent] = []
        self.used_bytes = 0  # number of bytes that are written

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.flush()
        del self.bytes  # the mapping itself is closed with its last view

    def end(self, used: int) -> Extent:
        """Return the place of what ends at this byte, after its pages were written and released."""
        start, self.used_bytes = self.used_bytes, used
        size = used - start
        with memoryview(self._memory) as view:
            checksum = zlib.crc32(view[start:used])
        self._memory.flush(start, size)
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, start, size)
        self.extents.append(Extent(start, size, checksum))
        return self.extents[-1]

    def append(self, raw: memoryview, size: int) -> Extent:
        """Copy bytes to the end of the file, filled up to a size."""
        with memoryview(self._memory) as view:
            view[self.used_bytes : self.used_bytes + len(raw)] = raw
        return self.end(self.used_bytes + size)


LEAST_LAYERS = 2


def shallow(blueprint: Blueprint, store: WeightStore) -> tuple[Blueprint, WeightStore]:
    """Return the shortest beginning of a model that has two layers, and one of every kind.

    Layers of one kind differ in the values of their weights only: passes run the same kernels for them.
    """
    kinds = [_without_names(dataclasses.asdict(layer)) for layer in blueprint.layers]
    count = max(min(LEAST_LAYERS, len(kinds)), *(1 + kinds.index(kind) for kind in kinds))
    return (
        dataclasses.replace(blueprint, layers=blueprint.layers[:count]),
        dataclasses.replace(
            store,
            decoder={**store.decoder, "num_layers": count},
            layers=store.layers[:count],
            extents=store.extents[:count],
        ),
    )


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_names(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_names(part) for part in value]
    return "" if isinstance(value, str) else value
