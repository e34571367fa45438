"""Models of the catalogue for tests marked `weights`: fetched when they are missing. Not a test itself."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from draftree.core.errors import WeightsError
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.loading.resolve import resolve_model

UNREACHABLE = ("cannot be reached", "no 'npm' was found")
"""Message of the error if this machine cannot fetch the model; every other error is a failure."""


def folder_of(name: str) -> Path:
    """The model's folder. Skips the test if the registry cannot be reached."""
    try:
        return resolve_model(name)
    except WeightsError as error:
        if any(reason in str(error) for reason in UNREACHABLE):
            pytest.skip(str(error))
        raise


@functools.lru_cache(maxsize=1)
def loaded_float32(name: str) -> LoadedModel:
    """The model in float32 on the CPU. The last one is kept for further tests; several would fill the memory."""
    folder_of(name)
    return load_model(name, dtype="float32", device="cpu")
