"""Libraries of the variants that this machine runs, compiled together at the first use."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from draftree.models.native.build import Variant, build_all, built_library, preferred_variants, runnable_variants
from draftree.models.native.library import Library, TilesRefusedError

BUILDS = {variant.name: variant for variant in runnable_variants()}
OWN = preferred_variants()[0]
EACH_BUILD = [pytest.param(name, marks=() if name == OWN.name else pytest.mark.kernels) for name in BUILDS]
"""All variants as parameters; `make test` runs this machine's own alone, since the others take minutes to compile."""


@functools.cache
def _paths() -> dict[Variant, Path]:
    return build_all()


def built(name: str) -> Library:
    """The library of a variant; skips if the compiler or the system does not support its instructions."""
    path = built_library() if name == OWN.name else _paths().get(BUILDS[name])
    if path is None:
        pytest.skip(f"the compiler does not know variant '{name}'")
    try:
        return Library(path)
    except TilesRefusedError as error:
        pytest.skip(str(error))
