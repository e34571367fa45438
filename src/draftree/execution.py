"""How a command loads and runs its models: the options that all have, and loading by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from draftree.core.errors import ConfigurationError
from draftree.core.host import apply_threads
from draftree.loading.load import LoadedModel, load_model
from draftree.parallel.entry import load_divided
from draftree.parallel.options import SINGLE, ParallelOptions


class NamesModel(Protocol):
    """Settings that name one model and how to load it."""

    @property
    def model(self) -> str:
        """Name of the model, in any supported form."""

    @property
    def dtype(self) -> str:
        """Dtype of the model."""

    @property
    def device(self) -> str:
        """Device of the model."""

    @property
    def kernels(self) -> str:
        """Kernels of its passes."""

    @property
    def quantization(self) -> str | None:
        """Quantization of the weights; None for no quantization."""

    @property
    def offload(self) -> str | None:
        """Memory for the target's weights; None for all in memory."""

    @property
    def kv_dtype(self) -> str | None:
        """Format of keys and values; None for the dtype of the model."""

    @property
    def trust_remote_code(self) -> bool:
        """Whether Python code in the model's folder may run."""

    @property
    def parallel(self) -> ParallelOptions:
        """How the model is divided among processes."""


class RunsModel(NamesModel, Protocol):
    """Settings of a job that runs one model."""

    @property
    def threads(self) -> int | None:
        """CPU threads; None for the machine's choice."""

    @property
    def affinity(self) -> str | None:
        """Processors on which threads run, as for `apply_threads`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionSettings:
    """How the models of a job are loaded and run.

    Attributes:
        dtype: dtype of all models.
        device: device of all models.
        kernels: kernels of passes: "auto", "native", "torch" or "graphs".
        quantization: of the target's weights; None for no quantization.
        offload: memory for the target's weights, such as "8GB"; None for all in memory.
        kv_dtype: format of the target's keys and values: "int8", or None for its dtype.
        threads: CPU threads; None for the choice of `core.processors`.
        affinity: processors on which threads run, as for `core.affinity.apply_threads`.
        trust_remote_code: whether Python code in the folders of the models may run.
        parallel: how the target is divided among processes.
    """

    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    quantization: str | None = None
    offload: str | None = None
    kv_dtype: str | None = None
    threads: int | None = None
    affinity: str | None = None
    trust_remote_code: bool = False
    parallel: ParallelOptions = SINGLE


def require_positive(settings: object, *names: str) -> None:
    """Raise for settings of these names that are given and below 1.

    Raises:
        ConfigurationError: a value is below 1.
    """
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} is {value}: it must be at least 1")


def load_named(settings: NamesModel) -> LoadedModel:
    """Load the model by the settings.

    Raises:
        ModelError: it cannot be found or used.
    """
    options = {
        "dtype": settings.dtype,
        "device": settings.device,
        "kernels": settings.kernels,
        "quantization": settings.quantization,
        "offload": settings.offload,
        "kv_dtype": settings.kv_dtype,
        "trust_remote_code": settings.trust_remote_code,
    }
    return load_divided(load_model, settings.model, settings.parallel, options)


def load_for(settings: RunsModel) -> LoadedModel:
    """Load the model of a measurement by the settings, after setting the number of threads.

    Raises:
        ModelError: it cannot be found or used.
    """
    apply_threads(settings.threads, settings.affinity)
    loaded = load_named(settings)
    loaded.model.settle()
    return loaded
