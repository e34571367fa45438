"""Folders of heads: reading in every known layout, and writing in the layout of speculators."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, ModelLoadError, ModelNotFoundError
from draftree.heads import reading
from draftree.heads.base import Head
from draftree.heads.config import HeadConfig
from draftree.heads.kinds import head_class
from draftree.heads.layouts.base import MASK, OFFSETS, Layout
from draftree.heads.layouts.speculators import SpeculatorsLayout
from draftree.heads.shipped.packing import expanded

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_CONFIG_BYTES = 10_000_000
LAYOUTS: tuple[Layout, ...] = (SpeculatorsLayout(),)
"""Known layouts; the first one that matches is used."""


def read_config(folder: str | os.PathLike[str]) -> HeadConfig:
    """Return the configuration of the head in a folder; reads `config.json` only.

    Raises:
        ModelNotFoundError: there is no such folder, or it has no `config.json`.
        ModelLoadError: the file is damaged, or no known layout has such values.
    """
    values, layout = _values(Path(folder))
    if layout is None:
        return reading.read_config(Path(folder))
    return _config(Path(folder), layout, values)


def read_head(folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: Any = "cpu") -> Head:
    """Return the head of a folder, not yet bound to a target.

    Args:
        folder: the folder.
        dtype: dtype of the weights; None for that of the file.
        device: device of the weights.

    Raises:
        ModelNotFoundError: there is no such folder, or a file is missing.
        ModelLoadError: a file is damaged, or tensors are missing, unknown or of another shape.
        UnsupportedModelError: heads of this kind cannot be run.
    """
    path = Path(folder)
    values, layout = _values(path)
    if layout is None:
        return _head(path, reading.read_head(path), dtype, torch.device(device))
    config = _config(path, layout, values)
    try:
        stored = layout.stored(config, read_tensors(path))
        head = _empty(head_class(stored.config.kind), stored.config, stored.vocabulary)
    except ConfigurationError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    _fill(path, head, stored.parameters, dtype, torch.device(device))
    return head


def write_head(head: Head, folder: str | os.PathLike[str]) -> None:
    """Write a head in the layout of speculators; files of the same names are replaced.

    Args:
        head: the head; shared parts of the target are not written.
        folder: created if it does not exist.

    Raises:
        ModelLoadError: the layout has no heads of this kind.
    """
    from safetensors.torch import save_file

    path = Path(folder)
    values = SpeculatorsLayout().values(head.config)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in head.state_dict().items()}
    if not head.vocabulary.is_full:
        tensors[OFFSETS], tensors[MASK] = head.vocabulary.offsets().cpu(), head.vocabulary.mask().cpu()
    floating = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    values["torch_dtype"] = floating.pop() if len(floating) == 1 else "float32"
    path.mkdir(parents=True, exist_ok=True)
    unfinished = path / f"{WEIGHTS}.part"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.replace(path / WEIGHTS)
    unfinished = path / f"{CONFIG}.part"
    unfinished.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path / CONFIG)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder's safetensors files, on the host; packed ones are expanded.

    Raises:
        ModelNotFoundError: a file is missing.
        ModelLoadError: a file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            tensors.update(load_file(path))
        except (SafetensorError, OSError, ValueError) as reason:
            raise ModelLoadError(f"{path} is damaged or unreadable ({reason}): get the head again") from reason
    return expanded(tensors)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise ModelNotFoundError(f"{folder} has no '{WEIGHTS}': give the folder of a head, with its weights")
    names = _json(folder / INDEX).get("weight_map")
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
        raise ModelLoadError(f"{folder / INDEX} is damaged: it has no 'weight_map'")
    files = sorted(set(names.values()))
    for name in files:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelNotFoundError(f"{folder} has no file '{name}', which '{INDEX}' names: get the head again")
    return [folder / name for name in files]


def _head(folder: Path, read: reading.ReadHead, dtype: torch.dtype | None, device: torch.device) -> Head:
    """Return the module of a head in another layout."""
    head = _empty(head_class(read.config.kind), read.config, read.vocabulary)
    _fill(folder, head, read.tensors, dtype, device)
    return head


def _values(folder: Path) -> tuple[dict[str, Any], Layout | None]:
    """Return the content of `config.json`, and the layout; None for a layout of `heads/reading`."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"there is no folder '{folder}': give the path of a head's folder")
    path = folder / CONFIG
    if not path.is_file():
        raise ModelNotFoundError(f"{folder} has no '{CONFIG}': give the folder of a head")
    values = _json(path)
    for layout in LAYOUTS:
        if layout.matches(values):
            return values, layout
    if reading.is_known(folder):
        return values, None
    raise ModelLoadError(f"{path} does not describe a head in a known layout: {_traits(values)}")


def _traits(values: Mapping[str, Any]) -> str:
    """Describe what a configuration is instead."""
    kind = values.get("speculators_model_type")
    if kind is not None:
        return f"heads of type '{kind}' are not supported"
    if "architectures" in values:
        return f"it is of {values['architectures']}; drafter 'model' drafts with a whole model"
    return "it names neither 'speculators_model_type' nor 'architectures'"


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelLoadError(f"{path} has more than {MAX_CONFIG_BYTES} bytes: it is no configuration")
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as reason:
        raise ModelLoadError(f"{path} is damaged or unreadable ({reason}): get the head again") from reason
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} must hold one JSON object: get the head again")
    return values


def _config(folder: Path, layout: Layout, values: Mapping[str, Any]) -> HeadConfig:
    try:
        return layout.config(values)
    except (ConfigurationError, ModelLoadError) as error:
        raise ModelLoadError(f"{folder / CONFIG}: {error}") from error


def _empty(cls: type[Head], config: HeadConfig, vocabulary: Any) -> Head:
    """Return a head whose parameters have no memory yet."""
    with torch.device("meta"):
        return cls(config, vocabulary)


def _fill(
    folder: Path, head: Head, parameters: Mapping[str, Tensor], dtype: torch.dtype | None, device: torch.device
) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    for problem, names in (
        ("lacks the tensors", sorted(wanted.keys() - found.keys())),
        ("has unknown tensors", sorted(found.keys() - wanted.keys())),
    ):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise ModelLoadError(
                f"{folder} {problem} {', '.join(names[:8])}{more}: it is incomplete, or its config.json does not "
                f"describe it as a head of kind '{head.config.kind}'"
            )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ModelLoadError(f"{folder}: tensor '{name}' has shape {found[name]}, and config.json gives {shape}")
    cast = {name: tensor.to(device, dtype or _common(parameters)) for name, tensor in parameters.items()}
    head.load_state_dict(cast, assign=True)
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    head.vocabulary = head.vocabulary.to(device)
    head.eval()


def _common(parameters: Mapping[str, Tensor]) -> torch.dtype:
    """Return the widest dtype of the parameters."""
    found = torch.float16 if not parameters else next(iter(parameters.values())).dtype
    for tensor in parameters.values():
        found = torch.promote_types(found, tensor.dtype)
    return found
