"""Check that the layers of a served model can be divided between devices and this server."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.models.base import LayerSubset
from draftree.models.kv.slotted import SlottedModel
from draftree.remote.split.probe import Probe
from draftree.serve.pool import ServedModel

__all__ = ["probe_of", "require_divisible"]


async def require_divisible(models: Sequence[ServedModel], split: int) -> None:
    """Check loaded models for a server whose devices run the first layers.

    Args:
        models: all of the server.
        split: number of layers that devices run; 0 checks nothing.

    Raises:
        ConfigurationError: as `probe_of`.
    """
    for model in models if split else ():
        try:
            await probe_of(model, split)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}: serve it without --split") from error


async def probe_of(model: ServedModel, split: int) -> tuple[SlottedModel, Probe]:
    """Return the target of a model whose first layers run on devices, and states that a device compares.

    Args:
        model: a loaded model.
        split: number of layers that devices run.

    Raises:
        ConfigurationError: the model has too few layers, or they cannot be divided.
    """
    target = model.llm.llm.model
    if not isinstance(target, SlottedModel):
        raise ConfigurationError(f"{_undivided(model)}: it keeps its own cache")
    if target.streams_weights:
        raise ConfigurationError(f"{_undivided(model)}: offload reads them from a file")
    return target, await model.llm.between_steps(lambda: _probed(model, target, split))


def _probed(model: ServedModel, target: SlottedModel, split: int) -> Probe:
    """Return states of a few tokens; on the engine's thread."""
    if split >= target.num_layers:
        raise ConfigurationError(
            f"split={split}, and model '{model.name}' has {target.num_layers} layers, so none is left for the server"
        )
    try:
        target.require_part(LayerSubset(end=split))
        target.require_capture((split, target.num_layers))
    except UnsupportedModelError as error:
        raise ConfigurationError(f"{_undivided(model)}: {error}") from error
    return Probe.of_whole(target, split)


def _undivided(model: ServedModel) -> str:
    return f"the layers of model '{model.name}' cannot be divided"
