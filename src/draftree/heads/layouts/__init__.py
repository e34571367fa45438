"""Layouts of folders in which heads are stored, one per file: each is read, and some are written.

A layout is a module. It has `NAME`, `recognise`, `configure` and `tensors`; if heads are written in it, also `values`,
the content of `config.json`. All layouts give the same configuration and the same names of tensors: those of the
parameters of our modules. This file has their interface, the folder that they read, JSON values that are checked where
they are read, and decoder layers in the configurations of transformers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError, ModelNotFoundError
from draftree.heads.config import FULL, SLIDING, HeadConfig
from draftree.heads.quantized import BLOCK, expanded
from draftree.weights.folders import index_files, read_settings
from draftree.weights.packed_checkpoint import METHODS, SHAPE, PackedCheckpoint, quantization_of


@final
class Values:
    """An object of JSON, checked where its values are read. A value of null is the same as a missing one."""

    def __init__(self, content: Mapping[str, Any], place: str = "config.json") -> None:
        self.content = content
        self.place = place

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def get(self, name: str) -> Any:
        """Return a value of any type; None if it is missing."""
        return self.content.get(name)

    def require(self, *names: str) -> None:
        """Check that values are there."""
        missing = [name for name in names if self.get(name) is None]
        if missing:
            raise ModelLoadError(
                f"{self.place} does not have {', '.join(missing)}: the folder is incomplete, or of another layout"
            )

    def whole(self, name: str, default: int | None = None) -> int:
        """Return an integer; one without a default is required."""
        if default is None:
            self.require(name)
        value: int = self._typed(name, default, int, "an integer")
        return value

    def number(self, name: str, default: float) -> float:
        return float(self._typed(name, default, int | float, "a number"))

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return true or false."""
        value: bool = self._typed(name, default, bool, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        value: str = self._typed(name, default, str, "a string")
        return value

    def _typed(self, name: str, default: Any, kind: Any, words: str) -> Any:
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._wrong(name, words)
        return value

    def layers(self, name: str) -> tuple[int, ...]:
        """Return the indices of layers, which are required."""
        self.require(name)
        return tuple(self._list(name, int, "a list of layers"))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the strings of a list; empty if it is missing."""
        return tuple(self._list(name, str, "a list of strings"))

    def part(self, name: str, *, optional: bool = False) -> Values:
        """Return an object inside this one; a missing optional one is empty."""
        if not optional:
            self.require(name)
        return Values(self._typed(name, {}, Mapping, "an object"), name)

    def parts(self, name: str) -> list[Values]:
        """Return the objects of a list that has at least one; empty if it is missing."""
        values = self._list(name, Mapping, "a list of objects")
        if not values and self.get(name) is not None:
            raise self._wrong(name, "a list of objects")
        return [Values(value, name) for value in values]

    def _list(self, name: str, kind: Any, words: str) -> list[Any]:
        values: list[Any] = self._typed(name, [], list, words)
        if not all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
            raise self._wrong(name, words)
        return values

    def _wrong(self, name: str, kind: str) -> ModelLoadError:
        return ModelLoadError(f"{self.place} has {name}={self.get(name)!r}: it must be {kind}")


LLAMA, QWEN3 = "llama", "qwen3"


def layer_values(layer: Values) -> dict[str, Any]:
    """Return the values of `HeadConfig` that describe decoder layers and the target's vocabulary."""
    layer.require("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    hidden, heads = layer.whole("hidden_size"), layer.whole("num_attention_heads")
    if heads < 1:
        raise ModelLoadError(f"{layer.place} has num_attention_heads={heads}: it must be positive")
    return {
        "hidden": hidden,
        "num_layers": layer.whole("num_hidden_layers", 1),
        "num_heads": heads,
        "num_kv_heads": layer.whole("num_key_value_heads", heads),
        "head_dim": layer.whole("head_dim", hidden // heads),
        "intermediate": layer.whole("intermediate_size"),
        "epsilon": layer.number("rms_norm_eps", 1e-6),
        "rope": rope_of(layer),
        "max_length": layer.whole("max_position_embeddings", 2048),
        "activation": layer.text("hidden_act", "silu"),
        "attention_bias": layer.flag("attention_bias"),
        "mlp_bias": layer.flag("mlp_bias"),
        "vocab_size": layer.whole("vocab_size"),
    }


def rope_of(layer: Values) -> dict[str, Any]:
    """Return rotary positions in the form of `HeadConfig.rope`, as transformers 5 or earlier versions write them."""
    name = "rope_scaling" if layer.get("rope_parameters") is None else "rope_parameters"
    rope = dict(layer.part(name, optional=True).content)
    kind = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or kind or "default"
    rope["rope_theta"] = Values(rope, name).number("rope_theta", layer.number("rope_theta", 10000.0))
    return rope


def windows_of(layer: Values) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none; empty if no layer has one."""
    width = layer.whole("sliding_window", 0)
    windows = tuple(width if kind == SLIDING else 0 for kind in layer.texts("layer_types"))
    return windows if any(windows) else ()


def layers_json(config: HeadConfig) -> dict[str, Any]:
    """Return the configuration of the layers as transformers writes it, for its versions 4 and 5."""
    rope = dict(config.rope)
    windows: dict[str, Any] = {}
    if any(config.windows):
        windows = {
            "use_sliding_window": True,
            "sliding_window": max(config.windows),
            "layer_types": [SLIDING if width else FULL for width in config.windows],
        }
    return {
        "model_type": QWEN3 if config.qk_norm else LLAMA,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.epsilon,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_length,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        **windows,
    }


SELECTOR = {
    "conv_kernel_size": ("conv_taps", 2),
    "conv_group_size": ("conv_group", 16),
    "selector_rank": ("markov_rank", 256),
    "selector_top_k": ("num_candidates", 16),
}
"""Settings of DFlash2, with our names and defaults."""


def selector_values(values: Values) -> dict[str, int]:
    """Return the values of `HeadConfig` of DFlash2."""
    return {ours: values.whole(name, default) for name, (ours, default) in SELECTOR.items()}


def selector_json(config: HeadConfig) -> dict[str, int]:
    """Return the settings of DFlash2."""
    return {name: getattr(config, ours) for name, (ours, _) in SELECTOR.items()}


CONFIG = "config.json"
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
PACKED_PARTS = {part for names in METHODS.values() for part in (*names, SHAPE)}
"""Last parts of the names of tensors of 4-bit matrices."""
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@final
class HeadFolder:
    """A folder that may hold a head.

    Errors do not name it: the caller adds its path.
    """

    def __init__(self, path: Path, *, has_values: bool = True) -> None:
        """Open a folder; without values, its tensors are on the meta device, and headers of files alone are read."""
        self.path = path
        self._has_values = has_values

    @cached_property
    def values(self) -> Values:
        """The content of `config.json`."""
        if not (self.path / CONFIG).is_file():
            raise ModelNotFoundError(f"it has no '{CONFIG}': give the folder of a head")
        return Values(read_settings(self.path / CONFIG))

    @cached_property
    def files(self) -> list[str]:
        """Names of the files of tensors."""
        for name in (SAFE, *MEDUSA_FILES, PICKLED):
            if (self.path / name).is_file():
                return [name]
            if (index := self.path / (name + INDEX)).is_file():
                files = index_files(index)
                if missing := [file for file in files if not (self.path / file).is_file()]:
                    raise ModelNotFoundError(
                        f"it has no file '{missing[0]}', which '{index.name}' names: get the head again"
                    )
                return files
        raise ModelNotFoundError(f"it has no '{SAFE}', '{PICKLED}' or '{MEDUSA_FILES[0]}': its weights are missing")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by name, of 4-bit matrices that of their values. Values are not read."""
        if (packed := self._packed) is None:
            return self._stored
        others = {name: shape for name, shape in self._stored.items() if name.rpartition(".")[2] not in PACKED_PARTS}
        return others | {name: packed.shape(name) for name in packed.sources}

    @cached_property
    def _packed(self) -> PackedCheckpoint | None:
        """The files if some matrices have 4 bits."""
        codes = tuple(f".{names.codes}" for names in METHODS.values())
        if not any(name.endswith(codes) for name in self._stored):
            return None
        if (settings := quantization_of(self.path)) is None:
            raise ModelLoadError(f"it has 4-bit matrices, and its {CONFIG} no quantization_config: get the head again")
        return PackedCheckpoint(self.path, settings)

    @cached_property
    def _stored(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            if file.endswith(".safetensors"):
                with self._safe(file) as held:
                    shapes |= {name: tuple(held.get_slice(name).get_shape()) for name in list(held.keys())}
            else:
                shapes |= {name: tuple(tensor.shape) for name, tensor in self._unpickled(file, "meta").items()}
        return shapes

    def tensors(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """Return the tensors with wanted names, on the host, quantized ones as bfloat16."""
        tensors: dict[str, Tensor] = {}
        shapes = self.shapes
        if (packed := self._packed) is not None:
            for name in filter(wanted, packed.sources.keys() - self._stored.keys()):
                values = packed.values(name) if self._has_values else torch.empty(shapes[name], device="meta")
                tensors[name] = values.bfloat16()
        for file in self.files:
            if file.endswith(".safetensors"):
                with self._safe(file) as held:
                    read = held.get_tensor if self._has_values else partial(_without_values, held)
                    tensors |= {name: read(name) for name in list(held.keys()) if name in shapes and wanted(name)}
            else:
                held = self._unpickled(file, "cpu" if self._has_values else "meta")
                tensors |= {name: tensor for name, tensor in held.items() if wanted(name)}
        block = self.values.part("quantization_config", optional=True).get("weight_block_size")
        return expanded(tensors, block or BLOCK)

    @contextmanager
    def _safe(self, file: str) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path / file, framework="pt") as held:
                yield held
        except (OSError, SafetensorError, ValueError) as reason:
            raise ModelLoadError(f"'{file}' is damaged or unreadable ({reason}): get the head again") from reason

    def _unpickled(self, file: str, device: str) -> dict[str, Tensor]:
        try:
            held = torch.load(self.path / file, map_location=device, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as reason:
            raise ModelLoadError(f"'{file}' cannot be read as tensors: {reason}") from reason
        if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
            raise ModelLoadError(f"'{file}' is no table of tensors: nothing else is unpickled")
        return {str(name): value for name, value in held.items()}


def _without_values(file: Any, name: str) -> Tensor:
    part = file.get_slice(name)
    shape = part.get_shape()
    return torch.empty(shape, dtype=(part[:0] if shape else file.get_tensor(name)).dtype, device="meta")


class Layout(Protocol):
    """A module that reads one layout. Errors do not name the folder: the caller adds it."""

    NAME: str

    def recognise(self, folder: HeadFolder) -> bool:
        """Return whether the folder has this layout."""

    def configure(self, folder: HeadFolder) -> HeadConfig:
        """Return the configuration, from `config.json` and the names and shapes of tensors."""

    def tensors(self, folder: HeadFolder) -> dict[str, Tensor]:
        """Return the tensors by our names, with the maps of the draft vocabulary."""
