"""Loading of a target that is larger than memory: its packed weights in a file, or modules placed by accelerate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.loading.packed_start import FOLDER as PACKED
from draftree.loading.packed_start import keeps_packed
from draftree.loading.warm_start.native_record import Record, parsed
from draftree.loading.warm_start.native_start import StartKey, digest
from draftree.loading.warm_start.store import Store
from draftree.models.check import NATIVE_LENGTHS, rounds_alike
from draftree.models.memory import free_memory
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.library import library
from draftree.models.native.library_files import PACKING, working_folder
from draftree.models.native.model import NativeModel
from draftree.models.native.streaming.budget import parse_size
from draftree.models.native.streaming.model import StreamedModel, resident_model
from draftree.models.native.streaming.shallow import shallow
from draftree.models.native.streaming.store import WeightStore, add_facts, open_store, publish, write_store
from draftree.models.native.weights import FileWeights, Weights
from draftree.weights.cache import Cache

logger = logging.getLogger(__name__)

STABLE = ("folder", "dtype", "quantization", "files", "settings")
"""Facts of a start on which packed weights depend."""
NO_STREAM = "passes through torch were requested, or passes in C are not available here"


@dataclass(frozen=True, slots=True)
class Offload:
    """Options of a target whose weights are read in every pass.

    Attributes:
        memory: memory for its weights, such as "8GB".
        kernels: as for `load_model`.
        quantization: as for `load_model`.
        trust_remote_code: as for `load_model`.

    Raises:
        ConfigurationError: malformed memory, or kernels that cannot read weights in a pass.
    """

    memory: str | int
    kernels: str
    quantization: str | None
    trust_remote_code: bool

    def __post_init__(self) -> None:
        parse_size(self.memory)
        if self.kernels == "graphs":
            raise ConfigurationError(
                "kernels 'graphs' replay fixed addresses, and offloaded weights move: use 'auto', or leave offload out"
            )


class OffloadedStart:
    """Start of a model whose packed weights are streamed from the cache.

    Args:
        key: the model and its options.
        offload: memory for its weights, such as "8GB"; None keeps all of them in memory, so that only the packing
            is saved.

    Raises:
        ConfigurationError: malformed memory.
    """

    def __init__(self, key: StartKey, offload: str | int | None) -> None:
        self._key = key
        self._budget = None if offload is None else parse_size(offload)
        self._place = Cache().root / PACKED / key.name
        self.is_exact = False
        """Whether passes of all shapes have the same bits; set by `build_compared`."""

    def load(self) -> tuple[NativeModel, Record] | None:
        """Return the model if its weights were packed before, or if an ordinary start was recorded; else None.

        Raises:
            ConfigurationError: the memory is too small.
            ModelLoadError: its file is damaged or cannot be written.
        """
        found = self._packed_before()
        if found is not None:
            return found
        kept = Store().get(self._key.name, self._key.facts) if Store().is_on else None
        if kept is None:
            return None
        try:
            record = parsed(kept)
            weights = FileWeights(self._key.folder, record.places)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.info("%s: its record is not usable: %s", self._key.folder, error)
            return None
        try:
            model = self.build(record.blueprint, weights, quantization=self._key.quantization)
        finally:
            weights.close()
        if digest(model) != record.digest:
            raise ModelLoadError(
                f"'{self._key.folder}' gives other logits when its weights are streamed: delete '{self._place}' and "
                "load the model again"
            )
        self._complete(model, record)
        return model, record

    def build(self, blueprint: Blueprint, weights: Weights, *, quantization: str | None) -> NativeModel:
        """Pack weights into the cache, within a few layers of memory, and return the model that reads them.

        Raises:
            ConfigurationError: the memory is too small.
            ModelLoadError: the file cannot be written.
        """
        self._pack(blueprint, weights, quantization=quantization)
        return self._model(blueprint, open_store(self._place))

    @property
    def streams(self) -> bool:
        """Whether passes read weights from the file."""
        return self._budget is not None

    def build_compared(self, blueprint: Blueprint, weights: Weights, *, quantization: str | None) -> NativeModel:
        """Do as `build`, and before that set `is_exact` by passes of many shapes over the first layers.

        Whole passes would read the file some thirty times.

        Raises:
            DraftreeError: as `build`.
        """
        self._pack(blueprint, weights, quantization=quantization)
        if self._budget is None:  # the caller compares whole passes
            return self._model(blueprint, open_store(self._place))
        plan, store = shallow(blueprint, open_store(self._place))
        self.is_exact = rounds_alike(
            StreamedModel(plan, store, budget=self._budget, quantization=quantization), NATIVE_LENGTHS
        )
        return StreamedModel(blueprint, open_store(self._place), budget=self._budget, quantization=quantization)

    def _pack(self, blueprint: Blueprint, weights: Weights, *, quantization: str | None) -> None:
        with (
            Cache().locked(f"{PACKED}-{self._key.name}"),
            working_folder(self._place.parent, PACKING) as work,
        ):
            fresh = work / "fresh"
            fresh.mkdir()
            logger.info("packing the weights of '%s' to '%s'", self._key.folder, self._place)
            write_store(fresh, library(), blueprint, weights, quantization=quantization)
            publish(fresh, self._place)

    def record(self, model: NativeModel, eos_ids: tuple[int, ...]) -> None:
        """Store everything that the next start needs with the packed weights."""
        assert model.self_check is not None, "the model was checked"
        self._complete(model, Record(model.blueprint, {}, model.self_check, eos_ids, digest(model)))

    def _model(self, blueprint: Blueprint, store: WeightStore) -> NativeModel:
        quantization = self._key.quantization
        if self._budget is None:
            return resident_model(blueprint, store, quantization=quantization)
        return StreamedModel(blueprint, store, budget=self._budget, quantization=quantization)

    def _complete(self, model: NativeModel, record: Record) -> None:
        model.is_exact, model.self_check = record.check.is_exact, record.check
        own = Record(record.blueprint, {}, record.check, record.eos_ids, record.digest)
        add_facts(open_store(self._place), {"stable": self._stable(), "start": self._start(), "record": asdict(own)})

    def _stable(self) -> dict[str, Any]:
        return {name: self._key.facts[name] for name in STABLE}

    def _start(self) -> dict[str, Any]:
        return {name: value for name, value in self._key.facts.items() if name not in STABLE}

    def _packed_before(self) -> tuple[NativeModel, Record] | None:
        if not self._place.exists():
            return None
        try:
            store = open_store(self._place)
            if store.facts.get("stable") != self._stable():
                return None
            record = parsed(store.facts["record"])
        except (ModelLoadError, KeyError, TypeError) as error:
            logger.info("'%s' is not usable: %s", self._place, error)
            return None
        try:
            model = self._model(record.blueprint, store)
        except (KeyError, TypeError) as error:
            logger.info("'%s' was packed by another version: %s", self._place, error)
            return None
        if store.facts["start"] != self._start() and not self._is_same(model, record, store):
            return None
        model.is_exact, model.self_check = record.check.is_exact, record.check
        return model, record

    def _is_same(self, model: NativeModel, record: Record, store: WeightStore) -> bool:
        """Return whether other versions of the package or its kernels compute the same logits, and note them."""
        if digest(model) != record.digest:
            return False
        add_facts(store, {**store.facts, "start": self._start()})
        return True


def saved_packing(key: StartKey | None, quantization: str | None) -> OffloadedStart | None:
    """Return the start that saves packed weights whose quantization takes long; None for other weights."""
    return OffloadedStart(key, None) if key is not None and quantization == "int4" and keeps_packed() else None


def torch_placement(device: torch.device, offload: str | int, folder: Path) -> Mapping[str, Any]:
    """Return the arguments of `from_pretrained` with which accelerate places the modules of a model.

    Args:
        device: device of the passes.
        offload: memory for weights on it, such as "8GB".
        folder: an existing folder for weights that fit nowhere else and are in no safetensors file.

    Raises:
        ConfigurationError: malformed memory, or accelerate is not installed.
    """
    budget = parse_size(offload)
    if find_spec("accelerate") is None:
        raise ConfigurationError(
            f"offload is {offload!r}, and passes run through torch, which needs the package 'accelerate': install it, "
            "or use a model and a device with passes in C"
        )
    memory: dict[Any, int] = {"cpu": budget}
    if device.type == "cuda":
        memory = {device.index or 0: budget, "cpu": free_memory(torch.device("cpu")) or budget}
    return {"device_map": "auto", "max_memory": memory, "offload_folder": str(folder)}


def offload_folder() -> Path:
    """Return the folder of the cache in which accelerate may write weights; creates it."""
    place = Cache().root / "offloaded"
    place.mkdir(parents=True, exist_ok=True)
    return place
