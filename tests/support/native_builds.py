"""Libraries of the variants that this machine runs, compiled together at the first use."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from draftree.models.native.build import build_all
from draftree.models.native.library import Library, TilesRefusedError
from draftree.models.native.variants import Variant, runnable_variants

BUILDS = {variant.name: variant for variant in runnable_variants()}


@functools.cache
def _paths() -> dict[Variant, Path]:
    return build_all()


def built(name: str) -> Library:
    """The library of a variant; skips if the compiler or the system does not support its instructions."""
    path = _paths().get(BUILDS[name])
    if path is None:
        pytest.skip(f"the compiler does not know variant '{name}'")
    try:
        return Library(path)
    except TilesRefusedError as error:
        pytest.skip(str(error))
