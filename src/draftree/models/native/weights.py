"""Sources of weights for packing: a transformers model, or its files."""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftree.core.errors import ModelLoadError
from draftree.models.native.library import RowBlocks
from draftree.weights.folders import weight_files

MAPS = Path("/proc/self/maps")
SUFFIX = ".safetensors"


class FilePages:
    """Mapped weight files of this process; none if the system does not list them.

    A loaded weight is often a view of its mapped file. Its pages count as memory of this process from the first
    read until the last view is deleted.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        with suppress(OSError):
            for line in MAPS.read_text("utf-8", errors="replace").splitlines():
                if line.endswith(SUFFIX) and hasattr(mmap, "MADV_DONTNEED"):
                    first, _, end = line.split(maxsplit=1)[0].partition("-")
                    self._ranges.append((int(first, 16), int(end, 16)))

    def give_back(self, weight: Tensor) -> bool:
        """Release a weight's pages if they are mapped from a file; later reads load them again. Returns whether."""
        start, size = weight.data_ptr(), weight.numel() * weight.element_size()
        if not any(first <= start and start + size <= end for first, end in self._ranges):
            return False
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= end:
            return False
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        return madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED) == 0


TEXT_DECODER = "language_model"  # part of the names of its weights in the files of an image-text model
ROWS = 1024  # number of rows of a weight per comparison task


class Weights(ABC):
    """Weights by their names in the transformers model."""

    @abstractmethod
    def get(self, name: str) -> Tensor:
        """Return a weight in the dtype of the model or of its file."""

    @abstractmethod
    def release(self, name: str) -> None:
        """Free a packed weight's memory."""

    def blocks(self, name: str) -> RowBlocks | None:
        """Return a weight in the blocks of a GGUF file, which are used as they are; None if it has none."""
        return None

    def block_kind(self, name: str) -> str | None:
        """Return the kind of the blocks of a weight, of several the largest; None if it has none."""
        blocks = self.blocks(name)
        return None if blocks is None else blocks.kind

    def expert_blocks(self, name: str, expert: int) -> Sequence[RowBlocks] | None:
        """Return the matrices of one expert in blocks, those of gate and up apart; None if it has none."""
        return None

    def lends(self, name: str) -> bool:
        """Return whether a weight has another owner and stays in memory, so that it may be read without a copy."""
        return False


class ModelWeights(Weights):
    """Weights of a model in memory, which is unusable once they are released, unless it keeps them."""

    def __init__(self, model: Any, *, keeps: bool = False) -> None:
        self._model = model
        self._keeps = keeps
        self._parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._buffers: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))  # never released
        self._pages = FilePages()

    def get(self, name: str) -> Tensor:
        return (self._buffers if name in self._buffers else self._parameters)[name].detach()

    def release(self, name: str) -> None:
        if self._keeps or name in self._buffers:
            return
        weight = self._parameters.pop(name)
        self._pages.give_back(weight)
        owner, _, attribute = name.rpartition(".")
        empty = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        setattr(self._model.get_submodule(owner), attribute, empty)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    file: str  # file in the model's folder
    key: str  # name in the file
    shape: tuple[int, ...]  # shape in the file
    dtype: str = ""  # torch's name of its dtype in the model; empty for that in the file


class FileWeights(Weights):
    """Weights of memory-mapped safetensors files. Closed by `close`."""

    def __init__(self, folder: Path, places: Mapping[str, StoredWeight]) -> None:
        from safetensors import SafetensorError, safe_open

        self._places = places
        self._stack = ExitStack()
        try:
            names = sorted({place.file for place in places.values()})
            self._files = {name: self._stack.enter_context(safe_open(folder / name, framework="pt")) for name in names}
            for place in places.values():
                shape = tuple(self._files[place.file].get_slice(place.key).get_shape())
                if shape != place.shape:
                    raise ValueError(f"'{place.key}' of '{place.file}' has the shape {shape}, expected {place.shape}")
        except SafetensorError as error:
            self._stack.close()
            raise ValueError(f"'{folder}' cannot be read: {error}") from error
        self._mapped: dict[str, Tensor] = {}
        self._pages: dict[str, FilePages] = {}

    def get(self, name: str) -> Tensor:
        if name not in self._mapped:
            place = self._places[name]
            self._mapped[name] = self._files[place.file].get_tensor(place.key)
            if place.file not in self._pages:
                self._pages[place.file] = FilePages()
        weight, dtype = self._mapped[name], self._places[name].dtype
        return weight.to(getattr(torch, dtype)) if dtype else weight

    def release(self, name: str) -> None:
        self._pages[self._places[name].file].give_back(self._mapped.pop(name))

    def close(self) -> None:
        self._mapped.clear()
        self._stack.close()


@torch.inference_mode()
def places_in_files(model: Any, names: Iterable[str], folder: Path) -> dict[str, StoredWeight] | None:
    """Return the location of a model's weights in its files; None if the files have other values.

    Every value is compared: libraries rename, split and convert weights while loading them.
    """
    parameters = dict(model.named_buffers()) | dict(model.named_parameters())
    stored_weights = _candidates(folder, model)
    places = {name: place for name in names if (place := _place_of(name, stored_weights)) is not None}
    if len(places) < len(set(names)) or any(places[name].shape != tuple(parameters[name].shape) for name in places):
        return None
    try:
        stored = FileWeights(folder, places)
    except (OSError, ValueError):
        return None
    try:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for name in places:
                pieces = zip(parameters[name].detach().split(ROWS), stored.get(name).split(ROWS), strict=True)
                if not all(pool.map(lambda pair: torch.equal(pair[0], pair[1].to(pair[0].dtype)), pieces)):
                    return None
                stored.release(name)
    finally:
        stored.close()
    kinds = {name: str(parameters[name].dtype).removeprefix("torch.") for name in places}
    return {name: replace(place, dtype=kinds[name]) for name, place in places.items()}


def _place_of(name: str, stored_weights: Mapping[str, StoredWeight]) -> StoredWeight | None:
    """Return the place of a weight; a text decoder may have a longer name in the files of an image-text model."""
    if name in stored_weights:
        return stored_weights[name]
    end = "." + name.removeprefix("model.")
    longer = [key for key in stored_weights if key.endswith(end) and TEXT_DECODER in key.split(".")]
    return stored_weights[longer[0]] if len(longer) == 1 else None


def _candidates(folder: Path, model: Any) -> dict[str, StoredWeight]:
    """Return all weights in the files of a folder that transformers reads, by the names that it gives them."""
    from safetensors import SafetensorError, safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [change for change in get_model_conversion_mapping(model) if isinstance(change, WeightRenaming)]
    weights = {}
    try:
        for path in weight_files(folder):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118, it is no dictionary
                    name = key
                    for renaming in renamings:
                        name = renaming.rename_source_key(name)[0]
                    weights[name] = StoredWeight(path.name, key, tuple(file.get_slice(key).get_shape()))
    except (OSError, SafetensorError, ModelLoadError):
        return {}
    return weights
