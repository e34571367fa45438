"""Defaults of sampling parameters in the `generation_config.json` of a model, as vLLM reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError, InvalidRequestError, ModelLoadError
from draftree.sampling.params import NEUTRAL, Sampling, SamplingParams
from draftree.weights.folder_check import read_json

__all__ = ["require_source", "sampling_in", "sampling_note", "sampling_of"]

FILE = "generation_config.json"
SOURCES = ("auto", "none")


def require_source(generation_config: str) -> None:
    """Raise unless the value is "auto", for the defaults of the model, or "none" for none.

    Raises:
        ConfigurationError: it is another one.
    """
    if generation_config not in SOURCES:
        raise ConfigurationError(
            f"generation_config is {generation_config!r}: give 'auto' for the sampling defaults in the model's "
            f"{FILE}, or 'none'"
        )


def sampling_in(folder: Path | None) -> Sampling:
    """Return the defaults in a model's folder.

    Raises:
        ModelLoadError: the file is damaged, or has a value that is no sampling parameter.
    """
    path = None if folder is None else folder / FILE
    if path is None or not path.is_file():
        return NEUTRAL
    return sampling_of(read_json(path), str(path))


def sampling_of(settings: Mapping[str, Any], place: str) -> Sampling:
    """Return the defaults in the settings of a generation configuration.

    Args:
        settings: by name.
        place: where they are, for messages.

    Raises:
        ModelLoadError: a value is no sampling parameter.
    """
    values: dict[str, Any] = {field.name: settings.get(field.name) for field in dataclasses.fields(Sampling)}
    try:
        return SamplingParams(**values).sampling
    except InvalidRequestError as error:
        raise ModelLoadError(
            f"{place}: {error}; correct it, or ignore its sampling by generation_config='none' "
            "(--generation-config none)"
        ) from error


def sampling_note(sampling: Sampling) -> str:
    """Return the defaults in one sentence; empty if there are none."""
    changes = {name: value for name, value in dataclasses.asdict(sampling).items() if value != getattr(NEUTRAL, name)}
    if not changes:
        return ""
    listed = ", ".join(f"{name}={value:g}" for name, value in changes.items())
    return f"sampling defaults of the model: {listed} (generation_config 'none' turns them off)"
