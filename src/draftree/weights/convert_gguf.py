"""Conversion of a GGUF file to a plain model folder."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftree.core.errors import DraftreeError, ModelLoadError, UnsupportedModelError, panics_as_errors, suggestion
from draftree.weights.architectures import ARCHITECTURES, Architecture
from draftree.weights.config_check import check_sizes
from draftree.weights.gguf_file import Dtype, GgufFile
from draftree.weights.gguf_tokenizer import end_ids, save_gguf_tokenizer, token_id
from draftree.weights.plain_folder import parameter_shapes, save_configuration
from draftree.weights.progress import Progress
from draftree.weights.safetensors_file import write_safetensors

if TYPE_CHECKING:
    import torch

__all__ = ["GGUF_CONVERTER", "convert_gguf"]

JOINED = "+"
"""Between the names of tensors that make one parameter."""
GGUF_CONVERTER = "gguf-2"
"""Changes whenever the same file would convert to a different folder."""

EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")
"""Weights of all experts of a layer."""
TENSORS_READ_ELSEWHERE = frozenset({"rope_freqs.weight"})


def convert_gguf(source: Path, folder: Path, *, dtype: Dtype, progress: Progress) -> None:
    """Write configuration, weights (rounded to `dtype`) and tokenizer of a GGUF file into the empty `folder`.

    Raises:
        ModelLoadError: The file is damaged or incomplete.
        UnsupportedModelError: Its architecture or tokenizer is not supported.
    """
    file = GgufFile(source)
    try:
        with panics_as_errors():
            architecture, settings, shapes = save_description(file, folder, dtype=dtype)
            sources = tensor_sources(file, shapes)
    except (DraftreeError, OSError):
        raise
    except Exception as error:
        # Damaged metadata can fail anywhere in the libraries that build a model from it.
        raise file.broken(f"its metadata do not describe a model ({error})") from error
    tensors = unpacked(file, architecture, settings=settings, sources=sources, progress=progress)
    write_safetensors(folder / "model.safetensors", shapes, tensors, dtype=dtype)


def save_description(
    file: GgufFile, folder: Path, *, dtype: Dtype
) -> tuple[Architecture, dict[str, Any], dict[str, tuple[int, ...]]]:
    """Write tokenizer and configuration; returns the architecture, the settings and the shapes of the weights."""
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"'{file.path}' holds a model of the architecture '{name}', which cannot be unpacked from GGUF: "
            f"use the model's own folder; {suggestion(str(name), ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"'{file.path}' is one part of a model that was split into {file.metadata['split.count']} files: "
            "join them with 'llama-gguf-split --merge' first"
        )
    architecture = ARCHITECTURES[name]
    settings = architecture.settings(file)
    num_values = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    check_sizes(file.path, settings, num_tensors=len(file.tensors), num_values=num_values)
    save_gguf_tokenizer(file, folder)
    ends = end_ids(file)
    config = save_configuration(
        folder,
        model_type=architecture.model_type,
        model_class=architecture.model_class,
        settings=settings | special_ids(file),
        dtype=dtype,
        stop_ids=ends if len(ends) > 1 else (),
    )
    return architecture, settings, parameter_shapes(config)


def special_ids(file: GgufFile) -> dict[str, int]:
    ids = {role: token_id(file, role) for role in ("bos", "eos", "padding")}
    return {
        f"{'pad' if role == 'padding' else role}_token_id": index for role, index in ids.items() if index is not None
    }


def tensor_sources(file: GgufFile, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Map every parameter of the model to its GGUF tensor; each tensor of the file must be used, and match in shape.

    Gate and up projections of experts are two tensors of the file: their names are joined by `JOINED`.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    name = file.metadata["general.architecture"]
    arch = next(arch for arch, spelled in MODEL_ARCH_NAMES.items() if spelled == name)
    names = get_tensor_name_map(arch, file.metadata[f"{name}.block_count"])
    sources: dict[str, str] = {}
    for parameter, shape in shapes.items():
        source = expert_sources(parameter) or names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if source is None:
            raise UnsupportedModelError(f"'{file.path}': no GGUF tensor is known for the parameter '{parameter}'")
        found = joined_shape(file, source)
        if found != shape:
            raise file.broken(f"tensor '{source}' has the shape {list(found)}, and its metadata declare {list(shape)}")
        sources[parameter] = source
    used = {name for source in sources.values() for name in source.split(JOINED)}
    if unused := sorted(set(file.tensors) - used - TENSORS_READ_ELSEWHERE):
        raise UnsupportedModelError(
            f"'{file.path}' holds tensors that do not belong to a model of its architecture '{name}' "
            f"({', '.join(unused[:3])}): use the model's own folder"
        )
    return sources


def expert_sources(parameter: str) -> str | None:
    """Return the tensors of the experts of a layer; None for other parameters."""
    found = EXPERTS.fullmatch(parameter)
    if found is None:
        return None
    parts = ("gate", "up") if found[2] == "gate_up" else ("down",)
    return JOINED.join(f"blk.{found[1]}.ffn_{part}_exps.weight" for part in parts)


def joined_shape(file: GgufFile, source: str) -> tuple[int, ...]:
    """Return the shape of a tensor, or of several of the same shape that are joined in their last dimension but one."""
    shapes = [file.tensor(name).shape for name in source.split(JOINED)]
    if len(shapes) == 1:
        return shapes[0]
    if len(set(shapes)) > 1 or len(shapes[0]) != 3:
        raise file.broken(f"the tensors {source.split(JOINED)} have the shapes {shapes}")
    experts, outputs, inputs = shapes[0]
    return experts, len(shapes) * outputs, inputs


def read_joined(file: GgufFile, source: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the values of a tensor, or of several that are joined, float32."""
    parts = [file.read(name) for name in source.split(JOINED)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)


def joined_bytes(file: GgufFile, source: str) -> int:
    """Return the size of a tensor, or of several that are joined, in the file."""
    return sum(file.tensor(name).num_bytes for name in source.split(JOINED))


def unpacked(
    file: GgufFile,
    architecture: Architecture,
    *,
    settings: dict[str, Any],
    sources: dict[str, str],
    progress: Progress,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter in the layout of transformers, in float32."""
    import torch

    total_bytes = sum(joined_bytes(file, source) for source in sources.values())
    done_bytes = 0
    for parameter, source in sources.items():
        values = architecture.restore(parameter, read_joined(file, source), settings)
        if not np.isfinite(values).all():
            raise ModelLoadError(f"'{file.path}' is damaged: tensor '{source}' has values that are not finite")
        yield parameter, torch.from_numpy(np.require(values, requirements=["C", "W"]))
        done_bytes += joined_bytes(file, source)
        progress("convert", done_bytes, total_bytes)
