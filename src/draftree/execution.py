"""How a command loads and runs its models: the options that all have, and loading by them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from draftree.core.errors import ConfigurationError
from draftree.core.host import apply_threads
from draftree.loading.load import LoadedModel, load_model
from draftree.parallel.entry import load_divided
from draftree.parallel.options import SINGLE, ParallelOptions


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """Which model a job runs, and how its models are loaded and run.

    Attributes:
        model: name of the target, in any supported form.
        dtype: dtype of all models.
        device: device of all models.
        kernels: kernels of passes: "auto", "native", "torch" or "graphs".
        quantization: of the target's weights; None for no quantization.
        offload: memory for the target's weights, such as "8GB"; None for all in memory.
        kv_dtype: format of the target's keys and values: "int8", or None for its dtype.
        threads: CPU threads; None for the machine's choice.
        affinity: processors on which threads run, as for `core.host.apply_threads`.
        trust_remote_code: whether Python code in the folders of the models may run.
        parallel: how the target is divided among processes.
    """

    model: str
    _: KW_ONLY
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
    """Raise for settings of these names that are given and below 1."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} is {value}: it must be at least 1")


def load_named(settings: ExecutionSettings) -> LoadedModel:
    """Load the target by the settings."""
    names = ("dtype", "device", "kernels", "quantization", "offload", "kv_dtype", "trust_remote_code")
    options = {name: getattr(settings, name) for name in names}
    return load_divided(load_model, settings.model, settings.parallel, options)


def load_for(settings: ExecutionSettings) -> LoadedModel:
    """Load the target of a measurement by the settings, after setting the number of threads."""
    apply_threads(settings.threads, settings.affinity)
    loaded = load_named(settings)
    loaded.model.settle()
    return loaded
