"""Folders of heads: the layout of a folder is decided here, and heads are read in every layout and written.

A folder has the first layout of `LAYOUTS` that recognises it. Our own heads are written in the layout of speculators.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, ModelError, ModelLoadError, ModelNotFoundError
from draftree.heads.base import Head
from draftree.heads.config import HeadConfig
from draftree.heads.kinds import head_class
from draftree.heads.layouts import dflash, dspark, eagle, medusa, mtp, speculators
from draftree.heads.layouts.base import Layout
from draftree.heads.layouts.checks import require_tensors
from draftree.heads.layouts.folder import CONFIG, SAFE, HeadFolder
from draftree.heads.shipped.packing import expanded
from draftree.heads.tensors import MASK, OFFSETS, maps_of, vocabulary_of, widest_dtype

LAYOUTS: tuple[Layout, ...] = (speculators, medusa, dflash, dspark, mtp, eagle)
"""In the order in which they are tried; those with a name in the configuration first."""


def is_head(folder: Path) -> bool:
    """Return whether the folder has one of the layouts."""
    try:
        layout_of(HeadFolder(folder))
    except ModelError:
        return False
    return True


def read_config(folder: str | os.PathLike[str]) -> HeadConfig:
    """Return the configuration of the head in a folder; reads `config.json`, and names and shapes of tensors.

    Args:
        folder: the folder; for MTP that of the target.

    Raises:
        ModelNotFoundError: there is no such folder, or a file is missing.
        ModelLoadError: a file is damaged, the layout is not known, or the configuration cannot be read.
    """
    with _opened(folder) as held:
        return layout_of(held).configure(held)


def read_head(folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: Any = "cpu") -> Head:
    """Return the head of a folder, not yet bound to a target.

    Args:
        folder: the folder; for MTP that of the target.
        dtype: dtype of the weights; None for the widest one of the file.
        device: device of the weights.

    Raises:
        ModelNotFoundError: there is no such folder, or a file is missing.
        ModelLoadError: a file is damaged, or tensors are missing, unexpected or of another shape.
        UnsupportedModelError: heads of this kind cannot be run.
    """
    with _opened(folder) as held:
        layout = layout_of(held)
        config = layout.configure(held)
        tensors = expanded(layout.tensors(held))
        vocabulary = vocabulary_of(tensors, config)
        parameters = {name: tensor for name, tensor in tensors.items() if name not in (OFFSETS, MASK)}
        with torch.device("meta"):
            head = head_class(config.kind)(config, vocabulary)
        require_tensors(parameters, head.state_dict(), layout.NAME)
    _fill(head, parameters, dtype or widest_dtype(parameters), torch.device(device))
    return head


def write_head(head: Head, folder: str | os.PathLike[str]) -> None:
    """Write a head in the layout of speculators; files of the same names are replaced.

    Args:
        head: the head; shared parts of the target are not written.
        folder: created if it does not exist.

    Raises:
        ModelLoadError: the layout has no heads of this kind.
    """
    write_folder(Path(folder), speculators.values(head.config), {**head.state_dict(), **maps_of(head.vocabulary)})


def write_folder(folder: Path, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write `model.safetensors` and `config.json` with the dtype of the weights; each file appears when complete.

    Args:
        folder: created if it does not exist.
        values: content of `config.json`.
        tensors: by the names of the layout.
    """
    from safetensors.torch import save_file

    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    values = {**values, "torch_dtype": str(widest_dtype(stored)).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{SAFE}.part"
    save_file(stored, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / SAFE)
    unfinished = folder / f"{CONFIG}.part"
    unfinished.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(folder / CONFIG)


def layout_of(folder: HeadFolder) -> Layout:
    """Return the layout of a folder.

    Raises:
        ModelNotFoundError: a file is missing.
        ModelLoadError: a file is damaged, or no layout recognises the folder.
    """
    for layout in LAYOUTS:
        if layout.recognise(folder):
            return layout
    architectures = ", ".join(folder.values.texts("architectures")) or "none"
    raise ModelLoadError(
        f"it has no known layout of a head ({', '.join(known.NAME for known in LAYOUTS)}): its architectures are "
        f"{architectures}, its tensors {', '.join(sorted(folder.shapes)[:5])}, …; drafter 'model' drafts with a whole "
        "model"
    )


@contextmanager
def _opened(folder: str | os.PathLike[str]) -> Iterator[HeadFolder]:
    """Open a folder, and add its path to the errors of the block.

    Raises:
        ModelNotFoundError: there is no such folder.
        ModelLoadError: for an error of a configuration.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ModelNotFoundError(f"there is no folder '{path}': give the path of a head's folder")
    try:
        yield HeadFolder(path)
    except ConfigurationError as error:
        raise ModelLoadError(f"'{path}': {error}") from error
    except ModelError as error:
        raise type(error)(f"'{path}': {error}") from error


def _fill(head: Head, parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Give a head without memory its parameters."""
    head.load_state_dict({name: tensor.to(device, dtype) for name, tensor in parameters.items()}, assign=True)
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    head.vocabulary = head.vocabulary.to(device)
    head.eval()
