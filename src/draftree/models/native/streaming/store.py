"""Folder with the packed weights of one model: a file that is read layer by layer, small tensors, a description.

The file holds the products of the layers, one layer after the other, then the output head and the embedding, each at
the start of a page. It is written once per model, dtype and quantization, within a few layers of memory.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.core.files import MALFORMED, read_json
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.library import Library, format_of
from draftree.models.native.packed import PAGE, PackedWeights
from draftree.models.native.packing import bytes_needed
from draftree.models.native.streaming.reader import Extent
from draftree.models.native.streaming.structures import exported, layout
from draftree.models.native.weights import Weights

FORMAT = 3
WEIGHTS, SMALL, DESCRIPTION = "weights.bin", "small.safetensors", "description.json"


@dataclass(frozen=True, slots=True)
class WeightStore:
    """Open description of a folder of packed weights.

    Attributes:
        folder: the folder.
        decoder: fields of the model's structure, see `structures.py`.
        layers: fields of its layers' structures.
        extents: places of the layers in the file.
        tail: place of the products after the layers: the output head and a projection.
        embedding: place of a separate embedding; None if passes read the output head.
        small: small tensors.
        packed_bytes: size of all weights in memory in bytes, without padding.
        facts: what the caller stored with them.
    """

    folder: Path
    decoder: Mapping[str, Any]
    layers: Sequence[Mapping[str, Any]]
    extents: tuple[Extent, ...]
    tail: Extent
    embedding: Extent | None
    small: tuple[Tensor, ...]
    packed_bytes: int
    facts: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        last = self.tail if self.embedding is None else self.embedding
        return last.start + last.size

    @property
    def file(self) -> Path:
        """Path of the file of weights."""
        return self.folder / WEIGHTS


def write_store(
    folder: Path, library: Library, blueprint: Blueprint, weights: Weights, *, quantization: str | None
) -> WeightStore:
    """Pack weights into a new folder, within a few layers of memory; `add_facts` completes it.

    Args:
        folder: an empty folder.
        library: packs them.
        blueprint: architecture of the model.
        weights: read one by one and released once they are packed.
        quantization: "int8" for 8-bit weights, None for the model's dtype.

    Raises:
        ModelLoadError: the file cannot be written.
    """
    kind = format_of(quantization, blueprint.dtype)
    size = bytes_needed(blueprint, library, weights, kind=kind, page=PAGE)
    size += PAGE + blueprint.vocab * blueprint.hidden * (4 if blueprint.dtype == "float32" else 2)
    try:
        with open(folder / WEIGHTS, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises here, not as a fault in mapped memory
            with _Mapped(mmap.mmap(file.fileno(), size)) as mapped:
                packed = PackedWeights(
                    library, blueprint, weights, kind=kind, arena=mapped.bytes, after_layer=mapped.end_layer
                )
                description, small = _described(packed, [*mapped.extents, mapped.end(packed.used_bytes)], mapped.append)
                small = [tensor.clone() for tensor in small]
                del packed
            file.truncate(mapped.used_bytes)
            os.fsync(file.fileno())
        _save_small(small, folder)
        _write(folder, description)
    except OSError as error:
        raise ModelLoadError(f"packed weights cannot be written to '{folder}': {error.strerror}") from error
    return open_store(folder)


def save_store(folder: Path, packed: PackedWeights, facts: Mapping[str, Any]) -> None:
    """Write packed weights that are in memory to a new folder.

    Args:
        folder: an empty folder.
        packed: weights of a whole model.
        facts: facts that JSON can represent, see `WeightStore`.

    Raises:
        OSError: the folder cannot be written.
    """
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
    _save_small(small, folder)
    _write(folder, {**description, "facts": facts})


def _described(
    packed: PackedWeights, extents: Sequence[Extent], append: Callable[[memoryview, int], Extent]
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the description of packed weights and the small tensors beside them.

    Args:
        packed: the weights.
        extents: places of the layers and of the tail.
        append: writes a separate embedding to the end of the file, filled up to a number of bytes.
    """
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


def _save_small(tensors: Sequence[Tensor], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file({str(number): tensor for number, tensor in enumerate(tensors)}, folder / SMALL)


def add_facts(store: WeightStore, facts: Mapping[str, Any]) -> WeightStore:
    """Store facts that JSON can represent with the weights; replaces those from before."""
    description = read_json(store.folder / DESCRIPTION)
    _write(store.folder, description | {"facts": facts})
    return dataclasses.replace(store, facts=facts)


def open_store(folder: Path) -> WeightStore:
    """Open a folder of packed weights; reads no large tensor.

    Raises:
        ModelLoadError: it is missing, incomplete or malformed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = read_json(folder / DESCRIPTION)
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']}, expected {FORMAT}")
        if found.get("layout") != layout():
            raise ValueError("another version of the package wrote it")
        small = load_file(folder / SMALL)
        extents = tuple(Extent(**extent) for extent in found["extents"])
        tensors = tuple(small[str(number)] for number in range(len(small)))
        store = WeightStore(
            folder,
            decoder=found["decoder"],
            layers=found["layers"],
            extents=extents,
            tail=Extent(**found["tail"]),
            embedding=None if found["embedding"] is None else Extent(**found["embedding"]),
            small=tensors,
            packed_bytes=found["packed_bytes"],
            facts=found.get("facts", {}),
        )
        size = store.file.stat().st_size
        if size != store.num_bytes:
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


def remove(folder: Path) -> None:
    """Remove a folder of packed weights."""
    shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, description: Mapping[str, Any]) -> None:
    part = folder / f"{DESCRIPTION}.part"
    part.write_text(json.dumps({"format": FORMAT, "layout": layout(), **description}), "utf-8")
    part.replace(folder / DESCRIPTION)


class _Mapped:
    """Mapped file into which weights are packed. Pages of finished layers are written and released."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.extents: list[Extent] = []
        self.used_bytes = 0
        """Number of bytes that are written."""

    def __enter__(self) -> _Mapped:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.flush()
        del self.bytes  # the mapping itself is closed with its last view

    def end_layer(self, used: int) -> None:
        """Note a layer that ends at this byte, write its pages and release them."""
        self.extents.append(self.end(used))

    def end(self, used: int) -> Extent:
        """Return the place of what ends at this byte, write its pages and release them."""
        start, self.used_bytes = self.used_bytes, used
        size = used - start
        with memoryview(self._memory) as view:
            checksum = zlib.crc32(view[start:used])
        self._memory.flush(start, size)
        if hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, start, size)
        return Extent(start, size, checksum)

    def append(self, raw: memoryview, size: int) -> Extent:
        """Copy bytes to the end of the file, filled up to a size."""
        with memoryview(self._memory) as view:
            view[self.used_bytes : self.used_bytes + len(raw)] = raw
        return self.end(self.used_bytes + size)
