"""Models whose products run in C on the blocks of their files: GGUF files, and checkpoints of 4 bits."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.core.files import expanded
from draftree.loading.choices import QUANTIZATIONS
from draftree.loading.packed_start import place_of
from draftree.loading.prepared import is_block_file
from draftree.loading.resolve import resolve_model
from draftree.loading.warm_start.store import BLOCKS_SUFFIX, Store
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.model import NativeModel
from draftree.weights.cache import Cache
from draftree.weights.fingerprint import status_of
from draftree.weights.gguf_blocks import describe_blocks
from draftree.weights.gguf_file import forget_gguf
from draftree.weights.packed_checkpoint import PackedCheckpoint
from draftree.weights.packed_scheme import SUFFIXES, quantization_of
from draftree.weights.progress import silent

__all__ = ["GGUF", "InBlocks", "WeightChoice", "load_in_blocks", "quantization_beside"]

GGUF = "gguf"
RECORD = "start.json"
"""File of the recorded structure in the description of a GGUF file."""


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """What the user chose about weights and passes; as for `load_model`."""

    kernels: str
    quantization: str | None
    offload: str | int | None
    device: torch.device

    @property
    def why_plain(self) -> str | None:
        """The option that needs plain weights; None if a model may run on the blocks of its files."""
        if self.quantization is not None:
            return f"quantization '{self.quantization}' needs plain weights"
        if self.offload is not None:
            return "offload needs plain weights"
        if self.kernels not in ("auto", "native"):
            return f"kernels '{self.kernels}' need plain weights"
        return None if self.device.type == "cpu" else f"device '{self.device}' needs plain weights"


@dataclass(frozen=True, slots=True)
class InBlocks:
    """A model that runs on the blocks of its files.

    Attributes:
        model: the model.
        folder: folder with its configuration and tokenizer.
        eos_ids: tokens that end a text.
        kind: name of its kind of weights.
    """

    model: NativeModel
    folder: Path
    eos_ids: tuple[int, ...]
    kind: str


def quantization_beside(name: str | os.PathLike[str], target: str | None) -> str | None:
    """Return the quantization of a draft model: that of the target, 8 bits if it runs on blocks of its files.

    Args:
        name: name of the draft model, which keeps its own blocks if it has any.
        target: quantization of the target; None for none.
    """
    if target is None or is_block_file(name):
        return None
    folder = expanded(os.fspath(name))
    if folder.is_dir() and (quantization_of(folder) or {}).get("quant_method") in SUFFIXES:
        return None
    return target if target in QUANTIZATIONS else "int8"


def load_in_blocks(name: str | os.PathLike[str], dtype: torch.dtype, choice: WeightChoice) -> InBlocks | Path:
    """Load a model that runs on the blocks of its files, or return the folder of any other model.

    Args:
        name: name of the model.
        dtype: dtype of keys and values, float32 or bfloat16.
        choice: the user's options.

    Returns:
        The model; or the folder of plain weights, which a GGUF file is converted to.

    Raises:
        ConfigurationError: an option that needs other weights.
        ModelError: as `resolve_model`; bits, groups, architecture or machine that passes in C do not support.
    """
    reason = choice.why_plain
    if reason is None and is_block_file(name):
        try:
            return _load_gguf(name, dtype)
        except NativeUnavailableError as why:
            reason = str(why)
    folder = resolve_model(name, reason=reason or "")
    return _load_packed(folder, dtype, choice) or folder


def _load_gguf(name: str | os.PathLike[str], dtype: torch.dtype) -> InBlocks:
    """Load a GGUF file whose blocks passes in C support.

    Args:
        name: name of the model.
        dtype: dtype of keys and values, float32 or bfloat16.

    Raises:
        ModelLoadError: the file is damaged.
        NativeUnavailableError: the dtype, the model or this machine has no passes in C.
        UnsupportedModelError: its architecture or tokenizer is not supported.
    """
    folder, file = describe_blocks(expanded(os.fspath(name)), Cache(), progress=silent)
    identity = str((Cache().manifest(folder.name) or {}).get("sha256", ""))
    try:
        from draftree.loading.block_start import start

        model, eos_ids = start(
            folder, file, dtype, record=folder / RECORD, place=identity, identity=identity, quantization=GGUF
        )
    finally:
        forget_gguf()
    return InBlocks(model, folder, eos_ids, GGUF)


def _load_packed(folder: Path, dtype: torch.dtype, choice: WeightChoice) -> InBlocks | None:
    """Load a checkpoint of 4 bits by GPTQ, AWQ or compressed-tensors; None for other folders.

    Args:
        folder: folder of the model.
        dtype: dtype of keys and values, float32 or bfloat16.
        choice: the user's options.

    Raises:
        ConfigurationError: an option that needs other weights.
        ModelLoadError: a file is missing or damaged.
        UnsupportedModelError: bits, groups, architecture or machine that passes in C do not support.
    """
    settings = quantization_of(folder)
    method = None if settings is None else str(settings.get("quant_method"))
    if settings is None or method not in SUFFIXES:
        return None
    if choice.why_plain is not None:
        raise ConfigurationError(
            f"'{folder}' has weights of few bits by {method}, which run as they are, in passes in C on a CPU: leave "
            "kernels, quantization and offload out, and use device 'cpu'"
        )
    source = PackedCheckpoint(folder, settings)
    files = [status_of(path) for path in sorted(folder.glob("*.safetensors"))]
    identity = hashlib.sha256(json.dumps([files, dict(settings)]).encode()).hexdigest()
    place = place_of(folder)
    record = Store().folder / f"{folder.name}-{place[:16]}{BLOCKS_SUFFIX}"
    try:
        from draftree.loading.block_start import start

        model, eos_ids = start(
            folder, source, dtype, record=record, place=place, identity=identity, quantization=method
        )
    except NativeUnavailableError as reason:
        raise UnsupportedModelError(
            f"'{folder}' has weights of 4 bits by {method}, which run in passes in C only: {reason}"
        ) from reason
    return InBlocks(model, folder, eos_ids, method)
