"""Folders of heads: the layout of a folder is decided here, and heads are read in every layout and written.

A folder has the first layout of `LAYOUTS` that recognises it. Our own heads are written in the layout of speculators.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import (
    ConfigurationError,
    ModelError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from draftree.core.files import write_json
from draftree.heads.base import Head
from draftree.heads.config import EAGLE, EAGLE3, FLASH_KINDS, GEMMA4, MEDUSA, MTP, PEAGLE, HeadConfig
from draftree.heads.layouts import (
    CONFIG,
    SAFE,
    HeadFolder,
    Layout,
    dflash,
    dspark,
    eagle,
    gemma4,
    medusa,
    mtp,
    speculators,
)
from draftree.heads.vocabulary import MASK, OFFSETS, maps_of, vocabulary_of, widest_dtype

CLASSES = {
    EAGLE: "draftree.heads.eagle:EagleHead",
    EAGLE3: "draftree.heads.eagle:Eagle3Head",
    PEAGLE: "draftree.heads.peagle:PEagleHead",
    MTP: "draftree.heads.mtp:MtpHead",
    **dict.fromkeys(FLASH_KINDS, "draftree.heads.dflash:DFlashHead"),
    MEDUSA: "draftree.heads.medusa:MedusaHead",
    GEMMA4: "draftree.heads.gemma4:AssistantHead",
}
"""Kind to module and class; a class takes a configuration and a vocabulary."""


def head_class(kind: str) -> type[Head]:
    if kind not in CLASSES:
        raise UnsupportedModelError(f"heads of kind '{kind}' cannot be run: {', '.join(sorted(CLASSES))} can")
    module, _, name = CLASSES[kind].partition(":")
    head: type[Head] = getattr(importlib.import_module(module), name)
    return head


MAX_NAMED = 12
"""Number of names that a message lists."""


def require_tensors(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], layout: str) -> None:
    """Check that floating-point tensors have the names and shapes of a head's parameters, no more and no less."""
    missing = sorted(wanted.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - wanted.keys())
    if missing or unexpected:
        parts = [f"missing: {_listed(missing)}"] if missing else []
        parts += [f"unexpected: {_listed(unexpected)}"] if unexpected else []
        raise ModelLoadError(f"it does not have the tensors of layout '{layout}': {'; '.join(parts)}")
    if differing := [
        f"{name} has {_by(tensors[name].shape)} instead of {_by(tensor.shape)}"
        for name, tensor in wanted.items()
        if tensors[name].shape != tensor.shape
    ]:
        raise ModelLoadError(
            f"it does not have the shapes of layout '{layout}': {_listed(differing, '; ')}: its config.json and its "
            "tensors contradict each other"
        )
    if other := sorted(name for name in wanted if wanted[name].is_floating_point() > tensors[name].is_floating_point()):
        raise ModelLoadError(f"{_listed(other)} are not floating-point numbers: use weights that are not packed")


def _listed(names: list[str], separator: str = ", ") -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return separator.join(names[:MAX_NAMED]) + more


def _by(shape: Iterable[int]) -> str:
    return "x".join(str(size) for size in shape) or "one number"


LAYOUTS: tuple[Layout, ...] = (speculators, medusa, gemma4, dflash, dspark, mtp, eagle)
"""In the order in which they are tried; those with a name in the configuration first."""


def is_head(folder: Path) -> bool:
    try:
        layout_of(HeadFolder(folder))
    except ModelError:
        return False
    return True


def read_config(folder: str | os.PathLike[str]) -> HeadConfig:
    """Return the configuration of the head in a folder, for MTP that of the target; no tensor is read."""
    with _opened(folder) as held:
        return layout_of(held).configure(held)


def check_head(folder: str | os.PathLike[str]) -> HeadConfig:
    """Return the configuration of a head whose tensors have the names and shapes of its layout; none is read.

    Raises:
        ModelError: a tensor is missing, unexpected or of another shape, or the folder is not one of a head.
    """
    with _opened(folder, has_values=False) as held:
        return _assembled(held)[0].config


def read_head(folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, device: Any = "cpu") -> Head:
    """Return the head of a folder (for MTP that of the target), not yet bound to a target.

    Weights have the widest dtype of the file by default.

    Raises:
        ModelError: as for `check_head`, or a value is infinite or not a number.
    """
    with _opened(folder) as held:
        head, parameters = _assembled(held)
        if broken := sorted(name for name, tensor in parameters.items() if not _is_finite(tensor)):
            raise ModelLoadError(f"values of {_listed(broken)} are infinite or not numbers: get the head again")
    dtype = dtype or widest_dtype(parameters)
    loaded = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in parameters.items()
    }
    head.load_state_dict(loaded, assign=True)
    head.requires_grad_(False)
    head.vocabulary = head.vocabulary.to(torch.device(device))
    return head.eval()


def _assembled(folder: HeadFolder) -> tuple[Head, dict[str, Tensor]]:
    """Return the head of a folder on the meta device, and the tensors of its parameters."""
    layout = layout_of(folder)
    config = layout.configure(folder)
    tensors = layout.tensors(folder)
    vocabulary = vocabulary_of(tensors, config)
    parameters = {name: tensor for name, tensor in tensors.items() if name not in (OFFSETS, MASK)}
    with torch.device("meta"):
        head = head_class(config.kind)(config, vocabulary)
    require_tensors(parameters, head.state_dict(), layout.NAME)
    return head, parameters


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(math.isfinite(float(bound)) for bound in tensor.aminmax())


def write_head(head: Head, folder: str | os.PathLike[str]) -> None:
    """Write a head in the layout of speculators, without what it shares with the target; files are replaced."""
    write_folder(Path(folder), speculators.values(head.config), {**head.state_dict(), **maps_of(head.vocabulary)})


def write_folder(folder: Path, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write `model.safetensors` and `config.json` with the dtype of the weights; each file appears when complete."""
    from safetensors.torch import save_file

    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{SAFE}.part"
    save_file(stored, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / SAFE)
    dtype = str(widest_dtype(stored)).removeprefix("torch.")
    write_json(folder / CONFIG, {**values, "torch_dtype": dtype}, indent=2)


def layout_of(folder: HeadFolder) -> Layout:
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
def _opened(folder: str | os.PathLike[str], *, has_values: bool = True) -> Iterator[HeadFolder]:
    """Open a folder, and add its path to the errors of the block."""
    path = Path(folder)
    if not path.is_dir():
        raise ModelNotFoundError(f"there is no folder '{path}': give the path of a head's folder")
    try:
        yield HeadFolder(path, has_values=has_values)
    except ConfigurationError as error:
        raise ModelLoadError(f"'{path}': {error}") from error
    except ModelError as error:
        raise type(error)(f"'{path}': {error}") from error
