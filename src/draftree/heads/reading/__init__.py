"""Reading of heads in the layouts of other projects.

A folder's layout is recognised by its configuration and the names of its tensors. Every layout is a module with
`recognise`, `configure` and `tensors`. All give the same configuration and the same names. An error names missing and
unexpected tensors.
"""

from __future__ import annotations

from pathlib import Path

from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.heads.config import MTP, HeadConfig
from draftree.heads.mtp import mtp_shapes
from draftree.heads.reading import dflash, dspark, eagle, medusa, mtp, speculators
from draftree.heads.reading.folder import HeadFolder
from draftree.heads.reading.layout import MAPS, Layout, ReadHead, TargetFacts, vocabulary_of
from draftree.heads.reading.names import require_tensors
from draftree.heads.tensors import tensor_shapes

__all__ = ["LAYOUTS", "ReadHead", "TargetFacts", "is_known", "read_config", "read_head"]

LAYOUTS: tuple[Layout, ...] = (speculators, medusa, dflash, dspark, mtp, eagle)
"""In the order in which they are tried; those with a name in the configuration first."""


def is_known(folder: Path | str) -> bool:
    """Return whether the folder has one of these layouts."""
    held = HeadFolder(Path(folder))
    try:
        return any(layout.recognise(held) for layout in LAYOUTS)
    except ModelLoadError:  # without tensors
        return False


def read_config(folder: Path | str, target: TargetFacts | None = None) -> HeadConfig:
    """Return the configuration of a head. Values of tensors are not read.

    Args:
        folder: the folder of the head; for MTP that of the target.
        target: facts of the target, which some layouts leave out.

    Raises:
        ModelNotFoundError: there is no folder.
        ModelLoadError: the layout is not known, or the configuration cannot be read.
    """
    held = HeadFolder(Path(folder))
    return _configured(held, _layout(held), target)


def read_head(folder: Path | str, target: TargetFacts | None = None) -> ReadHead:
    """Read a head from its folder.

    Args:
        folder: the folder of the head; for MTP that of the target.
        target: facts of the target, which some layouts leave out.

    Raises:
        ModelNotFoundError: there is no folder.
        ModelLoadError: the layout is not known, or the head cannot be read.
    """
    held = HeadFolder(Path(folder))
    layout = _layout(held)
    config = _configured(held, layout, target)
    tensors = layout.tensors(held)
    weights = {name: tensor for name, tensor in tensors.items() if name not in MAPS}
    wanted = mtp_shapes(config) if config.kind == MTP else tensor_shapes(config)
    require_tensors(weights, wanted, folder=held.path, layout=layout.NAME)
    maps = {name: tensors[name] for name in MAPS if name in tensors}
    return ReadHead(config, vocabulary_of(maps, config, held), weights, layout.NAME)


def _layout(folder: HeadFolder) -> Layout:
    layout = next((layout for layout in LAYOUTS if layout.recognise(folder)), None)
    if layout is None:
        raise ModelLoadError(
            f"'{folder.path}' has no layout of a head that is known ({', '.join(known.NAME for known in LAYOUTS)}): "
            f"architectures {', '.join(folder.architectures) or 'none'}, "
            f"tensors {', '.join(sorted(folder.shapes)[:5])}, …"
        )
    return layout


def _configured(folder: HeadFolder, layout: Layout, target: TargetFacts | None) -> HeadConfig:
    try:
        return layout.configure(folder, target)
    except ConfigurationError as error:
        raise ModelLoadError(f"'{folder.path}' cannot be read: {error}") from error
