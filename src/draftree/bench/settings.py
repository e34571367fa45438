"""What settings have in common: how they are checked, and the model that they name."""

from __future__ import annotations

from typing import Protocol

import torch

from draftree.core.errors import ConfigurationError
from draftree.loading.load import LoadedModel, load_model


class NamesModel(Protocol):
    """Settings that name one model, and how it is loaded."""

    @property
    def model(self) -> str:
        """Named as everywhere."""

    @property
    def dtype(self) -> str:
        """Of the model."""

    @property
    def device(self) -> str:
        """Of the model."""

    @property
    def kernels(self) -> str:
        """What computes passes."""

    @property
    def quantization(self) -> str | None:
        """Of the weights; None for as they come."""

    @property
    def trust_remote_code(self) -> bool:
        """Whether Python code that lies beside the weights may run."""


class RunsModel(NamesModel, Protocol):
    """Settings of a job that runs one model."""

    @property
    def threads(self) -> int | None:
        """Of torch; None leaves its own choice."""


def require_positive(settings: object, *names: str) -> None:
    """Refuse settings of these names that are given and below 1.

    Raises:
        ConfigurationError: one is.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} is {value}: it must be at least 1")


def apply_threads(threads: int | None) -> None:
    """From now on torch computes on so many; None leaves its own choice."""
    if threads is not None:
        torch.set_num_threads(threads)


def load_named(settings: NamesModel) -> LoadedModel:
    """The model as the settings want it.

    Raises:
        ModelError: it cannot be had or used.
    """
    return load_model(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        kernels=settings.kernels,
        quantization=settings.quantization,
        trust_remote_code=settings.trust_remote_code,
    )


def load_for(settings: RunsModel) -> LoadedModel:
    """The model as the settings want it, on as many threads as they say.

    Raises:
        ModelError: it cannot be had or used.
    """
    apply_threads(settings.threads)
    return load_named(settings)
