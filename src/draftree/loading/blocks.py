"""Native models that compute with the blocks of their files: GGUF files, and checkpoints of 4 bits.

The structure is found on a model of the first layers, whose weights are dequantized once and compared with passes over
the blocks. It is recorded, so that later starts need no transformers model, and the cache keeps the packed weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, ModelLoadError, UnsupportedModelError
from draftree.core.files import expanded
from draftree.core.host import return_free_memory
from draftree.loading.loaded import LoadedModel
from draftree.loading.native_start import GGUF, PackedStart, start_key
from draftree.loading.resolve import is_block_file
from draftree.loading.transformers_model import config_of, eos_ids_from
from draftree.models.base import Extend, Pass
from draftree.models.check import NATIVE_LENGTHS, check, reference_logits, rounds_alike, tokens_of_check
from draftree.models.native.blueprint import LayerBlueprint, LinearRecurrence
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import RowBlocks, library
from draftree.models.native.model import NativeModel
from draftree.models.native.weights import Weights
from draftree.models.torch.inspection import quiet
from draftree.options import QUANTIZATIONS
from draftree.weights.cache import Cache, silent, status_of, steps
from draftree.weights.folders import import_modeling
from draftree.weights.gguf_blocks import BlockFile, describe_blocks
from draftree.weights.gguf_file import KINDS, forget_gguf
from draftree.weights.packed_checkpoint import METHODS, PackedCheckpoint, quantization_of

logger = logging.getLogger(__name__)

LAYER_NUMBER = re.compile(r"\.(\d+)\.")
LEAST_LAYERS = 2  # minimum number of layers of the model on which the structure is found


BlockSource = BlockFile | PackedCheckpoint
"""Parameters in blocks, by their names in the transformers model.

`shape` and `values` (float32) are in the layout of transformers. If `has_tiled_heads`, blocks have the heads of delta
nets in another order, in which `in_block_order` returns values. `rows` are the blocks of a matrix, uint8, shape
(rows, bytes of a row); `order` has the row of each output, int64; `expert` has kind and blocks of an expert's matrices.
"""


class BlockWeights(Weights):
    def __init__(self, source: BlockSource) -> None:
        self._source = source

    def get(self, name: str) -> Tensor:
        return self._source.in_block_order(name)

    def blocks(self, name: str) -> RowBlocks | None:
        kind = self.block_kind(name)
        return None if kind is None else RowBlocks(kind, self._source.rows(name), self._source.order(name))

    def block_kind(self, name: str) -> str | None:
        kind = self._source.kind(name)
        return kind if kind in KINDS else None

    def expert_blocks(self, name: str, expert: int) -> Sequence[RowBlocks]:
        return [RowBlocks(kind, rows, torch.arange(len(rows))) for kind, rows in self._source.expert(name, expert)]

    def release(self, name: str) -> None:
        self._source.release(name)


def start_on_blocks(
    folder: Path, source: BlockSource, dtype: torch.dtype, *, identity: str, quantization: str
) -> tuple[NativeModel, tuple[int, ...]]:
    """Return a model on blocks, and the tokens that end a text; `identity` is the sum of the files."""
    from draftree.models.native.describe import DTYPES  # not at every start

    kind = str(dtype).removeprefix("torch.")
    if kind not in DTYPES:
        raise NativeUnavailableError(f"keys and values of native kernels are float32 or bfloat16, not {kind}")
    library()  # raises where there are no native kernels, before anything is read
    key = start_key(folder, dtype, quantization)
    start = None if key is None else PackedStart(key, weights=BlockWeights(source))
    if start is not None and (recorded := start.load()) is not None:
        model, record = recorded
        return model, record.eos_ids
    model, eos_ids = _first_start(folder, source, dtype, identity=identity, quantization=quantization)
    if start is not None:
        start.record(model, eos_ids, {})
    model.free_slots()  # of the comparisons
    return_free_memory()  # of the dequantized layers
    return model, eos_ids


def _first_start(
    folder: Path, source: BlockSource, dtype: torch.dtype, *, identity: str, quantization: str
) -> tuple[NativeModel, tuple[int, ...]]:
    """Find the structure, compare the first layers with dequantized ones, and build the whole model."""
    # later starts need none of these
    import_modeling()
    from draftree.loading.references import ROUNDED_TOLERANCE, in_float32, with_rounded_inputs
    from draftree.models.native.describe import plan_model

    steps.info("%s: comparing the first layers with those of transformers", folder.name)
    config, templates = _short_config(folder, source)
    short = _dequantized(config, source, dtype)
    eos_ids = eos_ids_from(folder, short)
    with quiet(), in_float32(short), with_rounded_inputs(short):
        reference = reference_logits(short)
    few = plan_model(short)
    if source.has_tiled_heads:
        few = replace(few, layers=tuple(map(_with_tiled_heads, few.layers)))
    for parameter in short.parameters():
        parameter.data = torch.empty(0)  # whatever else refers to the model
    del short
    shallow = NativeModel(few, BlockWeights(source), quantization=quantization)
    result = check(shallow, reference, tolerance=ROUNDED_TOLERANCE)
    if not (result.chains_ok and result.trees_ok):
        raise NativeUnavailableError(
            f"logits of its blocks differ from those of dequantized weights ({result.error:.1e})"
        )
    layers = tuple(_layer_at(few.layers[first], first, place) for place, first in enumerate(templates))
    _require_blocks(layers, source)
    _require_alike(few.layers, layers, templates, source)
    blueprint = replace(few, layers=layers, fingerprint=identity[:16])
    steps.info("%s: packing weights for native kernels", folder.name)
    model = NativeModel(blueprint, BlockWeights(source), quantization=quantization)
    _require_finite(model, folder)
    model.is_exact = result.is_exact and rounds_alike(model, NATIVE_LENGTHS)
    model.self_check = replace(result, is_exact=model.is_exact)
    return model, eos_ids


def _require_finite(model: NativeModel, folder: Path) -> None:
    """Raise ModelLoadError if weights of later layers, which were not compared, give logits that are not finite."""
    slot, tokens = model.open(), tokens_of_check(model.vocab_size)
    logits = model.run(Pass([Extend(slot, tokens, range(-1, len(tokens) - 1))])).logits.tensor()
    model.close(slot)
    if not bool(torch.isfinite(logits).all()):
        raise ModelLoadError(
            f"the weights of '{folder.name}' are damaged: its logits are not finite; get the file again"
        )


def _short_config(folder: Path, source: BlockSource) -> tuple[Any, list[int]]:
    """Return the configuration of a model of the first layers, and for each layer the first of the same type.

    Layers of a type have the same entry in the configuration, and the same parameters.
    """
    config = config_of(folder)
    names = _parameters_by_layer(source)
    kinds = list(getattr(config, "layer_types", None) or [""] * config.num_hidden_layers)
    types = [(kind, names.get(layer)) for layer, kind in enumerate(kinds)]
    first = {kind: types.index(kind) for kind in types}
    count = max(LEAST_LAYERS, 1 + max(first.values()))
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the model of the first layers is not quantized
    config.num_hidden_layers = min(count, len(types))
    if len(getattr(config, "layer_types", None) or ()) > count:  # of some families it follows from the number
        config.layer_types = kinds[:count]
    return config, [first[kind] for kind in types]


def _parameters_by_layer(source: BlockSource) -> dict[int, frozenset[str]]:
    """Return the names of each layer's parameters after its number."""
    names: dict[int, set[str]] = {}
    for name in source.sources:
        if (number := LAYER_NUMBER.search(name)) is not None:
            names.setdefault(int(number[1]), set()).add(name[number.end() :])
    return {layer: frozenset(parts) for layer, parts in names.items()}


@torch.no_grad()
def _dequantized(config: Any, source: BlockSource, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in source.sources}
    for name, parameter in (*model.named_parameters(), *buffers.items()):
        _require_shape(source, name, parameter.shape)
        parameter.copy_(source.values(name))
        source.release(name)
    return model.eval().requires_grad_(False)


def _with_tiled_heads(layer: LayerBlueprint) -> LayerBlueprint:
    recurrence = layer.recurrence
    if not isinstance(recurrence, LinearRecurrence):
        return layer
    return replace(layer, recurrence=replace(recurrence, is_tiled=True))


def _layer_at(template: LayerBlueprint, first: int, place: int) -> LayerBlueprint:
    """Return the layer of another place with the same structure."""

    def renamed(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace(f".{first}.", f".{place}.", 1)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: renamed(getattr(value, field.name)) for field in fields(value)})
        return tuple(map(renamed, value)) if isinstance(value, tuple) else value

    layer: LayerBlueprint = renamed(template)
    return layer


def _require_shape(source: BlockSource, name: str, wanted: Sequence[int]) -> None:
    shape = source.shape(name)
    if shape != tuple(wanted):
        raise ModelLoadError(
            f"the weights do not fit config.json: '{name}' has the shape {list(shape)}, and {list(wanted)} is needed; "
            "get the model again"
        )


def _require_alike(
    few: Sequence[LayerBlueprint], layers: Sequence[LayerBlueprint], templates: Sequence[int], source: BlockSource
) -> None:
    """Raise ModelLoadError if a parameter of a layer has another shape than in the layer that was compared."""
    for layer, first in zip(layers, templates, strict=True):
        for name, compared in zip(_names_in(layer), _names_in(few[first]), strict=True):
            if compared in source.sources:
                _require_shape(source, name, source.shape(compared))


def _names_in(value: Any) -> Iterator[str]:
    """Yield all strings of a blueprint, in the order of its fields."""
    if isinstance(value, str):
        yield value
    elif is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    for part in value if isinstance(value, list | tuple) else ():
        yield from _names_in(part)


def _require_blocks(layers: Sequence[LayerBlueprint], source: BlockSource) -> None:
    names = list(dict.fromkeys(part.weight for layer in layers for part in layer.products))
    if missing := [name for name in names if name not in source.sources or source.kind(name) not in KINDS]:
        raise NativeUnavailableError(
            f"{len(missing)} matrices of its layers have no blocks ({missing[0]}), and native kernels need all of them"
        )


def quantization_beside(name: str | os.PathLike[str], target: str | None) -> str | None:
    """Return a draft model's quantization: the target's, or 8 bits if that runs on blocks of its files."""
    if target is None or is_block_file(name):
        return None
    folder = expanded(os.fspath(name))
    if folder.is_dir() and (quantization_of(folder) or {}).get("quant_method") in METHODS:
        return None
    return target if target in QUANTIZATIONS else "int8"


def load_gguf(name: str | os.PathLike[str], dtype: torch.dtype) -> LoadedModel:
    """Load a GGUF file whose blocks native kernels read; `dtype` is that of keys and values."""
    folder, file = describe_blocks(expanded(os.fspath(name)), Cache(), progress=silent)
    identity = str((Cache().manifest(folder.name) or {}).get("sha256", ""))
    try:
        model, eos_ids = start_on_blocks(folder, file, dtype, identity=identity, quantization=GGUF)
    finally:
        forget_gguf()
    return LoadedModel.native(model, folder, eos_ids, name=str(name), quantization=GGUF)


def load_packed_checkpoint(
    name: str | os.PathLike[str], folder: Path, dtype: torch.dtype, *, plain_reason: str | None
) -> LoadedModel | None:
    """Load a checkpoint of 4 bits by GPTQ, AWQ or compressed-tensors; None for other folders."""
    settings = quantization_of(folder)
    method = None if settings is None else str(settings.get("quant_method"))
    if settings is None or method not in METHODS:
        return None
    if plain_reason is not None:
        raise ConfigurationError(
            f"'{folder}' has low-bit weights by {method}, which run as they are, in native kernels on a CPU: leave "
            "kernels, quantization and offload out, and use device 'cpu'"
        )
    source = PackedCheckpoint(folder, settings)
    files = [status_of(path) for path in sorted(folder.glob("*.safetensors"))]
    identity = hashlib.sha256(json.dumps([files, dict(settings)]).encode()).hexdigest()
    try:
        model, eos_ids = start_on_blocks(folder, source, dtype, identity=identity, quantization=method)
    except NativeUnavailableError as reason:
        raise UnsupportedModelError(
            f"'{folder}' has 4-bit weights by {method}, which run in native kernels only: {reason}"
        ) from reason
    return LoadedModel.native(model, folder, eos_ids, name=str(name), quantization=method)
