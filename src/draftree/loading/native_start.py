"""Later starts of models with native kernels: from packed weights in the cache, or from the record of the first start.

A later start needs no transformers and no self-check. A folder of packed weights is as large as the weights in memory.
It belongs to the files and versions that it was made for; the start of a model whose files or versions changed replaces
it.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import hashlib
import logging
import os
import shutil
import types
import typing
from collections import abc
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from draftree.core.errors import DraftreeError, ModelLoadError
from draftree.core.host import parse_size
from draftree.loading.records import Store, digest_of, is_on
from draftree.models.base import CheckResult, Extend, Pass
from draftree.models.check import EXACT_PARENTS, NATIVE_LENGTHS, exact_tokens, rounds_alike
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import library
from draftree.models.native.model import NativeModel
from draftree.models.native.packed import PackedWeights
from draftree.models.native.streaming.model import LEAST_MAPPED, BudgetError, StreamedModel, resident_model
from draftree.models.native.streaming.store import (
    WeightStore,
    add_facts,
    open_store,
    publish,
    save_store,
    shallow,
    write_store,
)
from draftree.models.native.weights import FileWeights, StoredWeight, Weights
from draftree.options import QUANTIZATIONS
from draftree.version import __version__
from draftree.weights.cache import WEIGHT_FILES, Cache, distrust, keep_sums, steps
from draftree.weights.packed_checkpoint import METHODS


@dataclass(frozen=True, slots=True)
class Record:
    blueprint: Blueprint  # structure of the native model
    places: Mapping[str, StoredWeight]  # locations of its weights in files
    check: CheckResult  # result of the self-check
    eos_ids: tuple[int, ...]  # tokens that end a text
    digest: str  # hash of logits that it computed


def parsed_record(values: Mapping[str, Any]) -> Record:
    """Return a record from its `dataclasses.asdict` form after JSON."""
    record: Record = _parsed(Record, values)
    return record


def _parsed(kind: Any, value: Any) -> Any:
    """Return a value of a type from what JSON made of it: dataclasses from objects, tuples from lists."""
    if isinstance(kind, types.UnionType):
        return None if value is None else _parsed(_member(kind, value), value)
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = _fields(kind)
        make = cast(Any, kind)
        return make(**{name: _parsed(kinds[name], part) for name, part in value.items()})
    match typing.get_origin(kind), typing.get_args(kind):
        case builtins.tuple, (part, *_):
            return tuple(_parsed(part, item) for item in value)
        case abc.Mapping, (_, part):
            return {name: _parsed(part, item) for name, item in value.items()}
    return value


def _member(union: types.UnionType, value: Any) -> Any:
    """Return the first member of a union, or of dataclasses the one with the fields of a value."""
    kinds = [kind for kind in union.__args__ if isinstance(kind, type) and is_dataclass(kind)]
    return next((kind for kind in kinds if _fields(kind).keys() == value.keys()), union.__args__[0])


_fields = functools.cache(typing.get_type_hints)


logger = logging.getLogger(__name__)

SETTINGS = ("config.json", "generation_config.json")
PATTERNS = ("*.json", *WEIGHT_FILES)
ROOT = Path(__file__).parents[1]
SOURCES = (
    *sorted((ROOT / "models" / "native").glob("*.py")),
    ROOT / "models" / "check.py",
    *(ROOT / "loading" / f"{name}.py" for name in ("native_start", "records", "references")),
)


@dataclass(frozen=True, slots=True)
class StartKey:
    """The model to be loaded, and its options."""

    name: str  # name of its record
    folder: Path  # folder of the model's files
    quantization: str | None  # of its packed weights; None for none
    facts: Mapping[str, Any]  # all facts that the record depends on


def start_key(
    folder: Path, dtype: torch.dtype, quantization: str | None, *, is_needed: bool = False
) -> StartKey | None:
    """Return the key under which a native start is recorded; None if nothing is to be recorded, unless it is needed."""
    if not (Store().is_on or is_needed):
        return None
    where, kind = str(folder.resolve()), str(dtype).removeprefix("torch.")
    try:
        files = [(path, path.stat()) for path in sorted({p for pattern in PATTERNS for p in folder.glob(pattern)})]
        facts = {
            "folder": where,
            "dtype": kind,
            "quantization": quantization,
            "library": library().path.name,
            "versions": [__version__, digest_of(SOURCES), torch.__version__, version("transformers")],
            "files": [[path.name, status.st_size, status.st_mtime_ns] for path, status in files],
            "settings": digest_of(path for name in SETTINGS if (path := folder / name).exists()),
        }
    except (NativeUnavailableError, OSError) as error:
        logger.info("%s: its start is not recorded: %s", folder, error)
        return None
    return StartKey(start_name(folder, kind, quantization), folder, quantization, facts)


def start_name(folder: Path, kind: str, quantization: str | None) -> str:
    key = hashlib.sha256("\0".join((str(folder.resolve()), kind, str(quantization))).encode()).hexdigest()
    return f"{folder.name}-{key[:16]}"


@torch.inference_mode()
def logits_digest(model: NativeModel) -> str:
    """Return a hash of the logits after a prefix, and in a tree batched with another sequence.

    The first start compared these passes bit by bit with others (`check.rounds_alike`): while their bits stay the
    same, `is_exact` holds.
    """
    tokens, length = exact_tokens(model.vocab_size), max(1, min(NATIVE_LENGTHS[0], model.max_length // 2))
    nodes = tokens[-len(EXACT_PARENTS) :]
    slot = model.open()
    prefix = Extend(slot, tokens[:length], range(-1, length - 1), logits_at=[length - 1], settled=length)
    chain = model.run(Pass([prefix])).logits.tensor().clone()
    model.commit(slot, range(length))
    other = model.fork(slot, model.cut_length(slot, length // 2))
    tree = model.run(Pass([Extend(other, tokens[:1], [-1]), Extend(slot, nodes, EXACT_PARENTS)])).logits.tensor()
    for opened in (slot, other):
        model.close(opened)
    return hashlib.sha256(b"".join(logits.contiguous().numpy().tobytes() for logits in (chain, tree))).hexdigest()


GGUF = "gguf"  # packing of models on blocks of a GGUF file
FOLDER = "packed"  # folder of packed weights in the cache
SWITCH = "DRAFTREE_PACKED"  # environment variable: 0 keeps no packed weights
LEAST_KEPT = LEAST_MAPPED
"""Least size in bytes of packed weights that are kept if packing is not slow: smaller ones take a tenth of a second."""
QUICK_TO_PACK = (None, "int8")
STABLE = ("folder", "dtype", "quantization", "files", "settings")
"""Facts of a start on which packed weights depend; if others change, their logits are compared again."""


def keeps_packed() -> bool:
    return is_on(SWITCH, "packed weights") and hasattr(os, "preadv")


def packed_folders(model: Path | None = None) -> list[tuple[Path, int]]:
    """Return the folders of packed weights in the cache, of one model or all, and their sizes in bytes."""
    names = None if model is None else _names_of(model)
    return [
        (folder, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
        for folder in sorted((Cache().root / FOLDER).glob("[!.]*/"))
        if names is None or folder.name in names
    ]


def remove_packed(model: Path | None = None) -> int:
    """Remove folders of packed weights, `model` as for `packed_folders`; return how many there were."""
    removed = packed_folders(model)
    for folder, _ in removed:
        shutil.rmtree(folder, ignore_errors=True)
    return len(removed)


def _names_of(model: Path) -> set[str]:
    from draftree.models.native.describe import PACKED_AS  # first starts use it

    packings = (None, *QUANTIZATIONS, GGUF, *METHODS)
    return {start_name(model, kind, packing) for kind in PACKED_AS for packing in packings}


@contextlib.contextmanager
def _packing_folder(place: Path) -> Iterator[Path]:
    """Yield a temporary folder for the packed weights at a place, whose lock is held."""
    cache = Cache()
    name = f"{FOLDER}-{place.name}"
    with cache.locked(name), cache.scratch(name) as work:
        yield work


def _keep(model: NativeModel, place: Path, facts: Mapping[str, Any]) -> None:
    """Write the packed weights of a model to a folder of the cache; log it if that is not possible."""
    packed = model.decoder.packed
    assert isinstance(packed, PackedWeights), "the weights were packed by this start"
    try:
        with _packing_folder(place) as work:
            free = shutil.disk_usage(work).free
            if 2 * packed.num_bytes > free:
                raise OSError(f"they would take {packed.num_bytes} of the {free} bytes that are free")
            fresh = work / "fresh"
            fresh.mkdir()
            steps.info("writing packed weights to '%s'", place)
            save_store(fresh, packed, facts)
            publish(fresh, place)
    except (DraftreeError, OSError) as error:
        level = logging.WARNING if model.quantization not in QUICK_TO_PACK else logging.INFO
        logger.log(level, "packed weights are not kept, so that every start packs them again: %s", error)


class PackedStart:
    """Start of a model with native kernels, and what it keeps for later ones.

    With `memory`, such as "8GB", passes read the weights beyond it from the cache.
    """

    def __init__(self, key: StartKey, memory: str | int | None = None, *, weights: Weights | None = None) -> None:
        self.key = key
        self._weights = weights
        self._budget = None if memory is None else parse_size(memory)
        self._place = Cache().root / FOLDER / key.name
        self.streams = self._budget is not None  # whether passes read weights from the cache
        # whether passes of all shapes have the same bits, if weights are streamed; set by `build`
        self.is_exact = False

    def load(self) -> tuple[NativeModel, Record] | None:
        """Return the model from packed weights or from the record of its first start; None if neither is usable."""
        if (packed := self._packed_before()) is not None:
            return packed
        kept = Store().get(self.key.name, self.key.facts) if Store().is_on else None
        if kept is None:
            return None
        try:
            record = parsed_record(kept)
            with contextlib.ExitStack() as files:
                weights = self._weights
                if weights is None:
                    weights = FileWeights(self.key.folder, record.places)
                    files.callback(weights.close)
                model = self._built(record.blueprint, weights)
        except BudgetError:
            raise
        except (NativeUnavailableError, OSError, ValueError, KeyError, TypeError) as error:
            logger.info("%s: its record is not usable: %s", self.key.folder, error)
            return None
        if logits_digest(model) != record.digest:
            logger.warning("%s: its record gives different logits now: its files are checked", self.key.folder)
            distrust(self.key.folder, Cache().root)
            return None
        self._keep(model, record)
        model.is_exact, model.self_check = record.check.is_exact, record.check
        return model, record

    def build(self, blueprint: Blueprint, weights: Weights) -> NativeModel:
        """Return the model of a first start, and set `is_exact` if its weights are streamed.

        Passes of many shapes over the first layers decide that: whole passes would read the file some thirty times.
        """
        model = self._built(blueprint, weights)
        if self._budget is not None:
            plan, store = shallow(blueprint, open_store(self._place))
            part = StreamedModel(plan, store, budget=self._budget, quantization=self.key.quantization)
            self.is_exact = rounds_alike(part, NATIVE_LENGTHS)
        return model

    def record(self, model: NativeModel, eos_ids: tuple[int, ...], places: Mapping[str, StoredWeight] | None) -> None:
        """Record what later starts need; `places` is None if the files have other values, and empty for blocks."""
        assert model.self_check is not None, "the model was checked"
        record = Record(model.blueprint, places or {}, model.self_check, eos_ids, logits_digest(model))
        if places:
            keep_sums(self.key.folder, Cache().root)
        if places is not None:
            Store().put(self.key.name, self.key.facts, asdict(record))
        self._keep(model, record)

    def _built(self, blueprint: Blueprint, weights: Weights) -> NativeModel:
        quantization = self.key.quantization
        if self._budget is None:
            return NativeModel(blueprint, weights, quantization=quantization)
        if any(layer.is_beside for layer in blueprint.layers):
            raise NativeUnavailableError("layers beside the residual stream are not streamed")
        place = self._place
        with _packing_folder(place) as work:
            fresh = work / "fresh"
            fresh.mkdir()
            logger.info("packing the weights of '%s' to '%s'", self.key.folder, place)
            write_store(fresh, library(), blueprint, weights, quantization=quantization)
            publish(fresh, place)
        return self._model(blueprint, open_store(place))

    def _model(self, blueprint: Blueprint, store: WeightStore) -> NativeModel:
        quantization = self.key.quantization
        if self._budget is None:
            return resident_model(blueprint, store, quantization=quantization)
        return StreamedModel(blueprint, store, budget=self._budget, quantization=quantization)

    def _keep(self, model: NativeModel, record: Record) -> None:
        """Keep packed weights whose logits were compared, with the record."""
        facts = {"stable": self._stable(), "start": self._start(), "record": asdict(replace(record, places={}))}
        if self.streams:
            add_facts(open_store(self._place), facts)
        elif keeps_packed() and (model.quantization not in QUICK_TO_PACK or model.footprint.weights >= LEAST_KEPT):
            _keep(model, self._place, facts)

    def _stable(self) -> dict[str, Any]:
        # files can change while their sizes and times stay the same; their status changes then
        statuses = [(self.key.folder / name).stat() for name, *_ in self.key.facts["files"]]
        facts = {name: self.key.facts[name] for name in STABLE}
        return facts | {"statuses": [[status.st_ino, status.st_ctime_ns] for status in statuses]}

    def _start(self) -> dict[str, Any]:
        return {name: value for name, value in self.key.facts.items() if name not in STABLE}

    def _packed_before(self) -> tuple[NativeModel, Record] | None:
        if not (self._place.exists() and (self.streams or keeps_packed())):
            return None
        try:
            store = open_store(self._place)
            if store.facts.get("stable") != self._stable():
                return None
            record = parsed_record(store.facts["record"])
            model = self._model(record.blueprint, store)
        except (ModelLoadError, OSError, KeyError, TypeError) as error:
            logger.info("'%s' is not usable: %s", self._place, error)
            return None
        if store.facts["start"] != self._start():  # other versions of the package or its kernels
            if logits_digest(model) != record.digest:
                return None
            with contextlib.suppress(OSError):
                add_facts(store, {**store.facts, "start": self._start()})
        model.is_exact, model.self_check = record.check.is_exact, record.check
        return model, record
