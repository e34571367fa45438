"""Classes of heads by kind."""

from __future__ import annotations

import importlib

from draftree.core.errors import UnsupportedModelError
from draftree.heads.base import Head
from draftree.heads.config import DFLASH, DSPARK, EAGLE, EAGLE3, MEDUSA, MTP, PEAGLE

CLASSES = {
    EAGLE: "draftree.heads.eagle:EagleHead",
    EAGLE3: "draftree.heads.eagle:Eagle3Head",
    PEAGLE: "draftree.heads.peagle:PEagleHead",
    MTP: "draftree.heads.mtp:MtpHead",
    DFLASH: "draftree.heads.dflash:DFlashHead",
    DSPARK: "draftree.heads.dflash:DFlashHead",
    MEDUSA: "draftree.heads.medusa:MedusaHead",
}
"""Kind to module and class; a class takes a configuration and a vocabulary."""


def head_class(kind: str) -> type[Head]:
    """Return the class of a kind.

    Raises:
        UnsupportedModelError: no class runs this kind.
    """
    if kind not in CLASSES:
        raise UnsupportedModelError(f"heads of kind '{kind}' cannot be run: {', '.join(sorted(CLASSES))} can")
    module, _, name = CLASSES[kind].partition(":")
    found: type[Head] = getattr(importlib.import_module(module), name)
    return found
