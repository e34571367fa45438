"""The first layers of a model as a model of their own: embedding, layers, final norm and output head."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.loading.choices import require_known
from draftree.loading.encoder_decoder import is_encoder_decoder
from draftree.loading.load import lower_model, wrap_model
from draftree.loading.reading import read_model
from draftree.loading.resolve import resolve_model
from draftree.models.kv.slotted import SlottedModel
from draftree.models.native.build import NativeUnavailableError

__all__ = ["load_first_layers"]


class _FirstLayers:
    """Reader of the first layers; all other weights of the files are not read.

    Args:
        count: number of layers.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def from_pretrained(self, folder: Path, **options: Any) -> Any:
        """Read the layers as `AutoModelForCausalLM` reads all."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        shorten(config.get_text_config(), self._count)
        trusts = options.pop("trust_remote_code", False)
        return AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=trusts, **options)


def shorten(config: Any, count: int) -> None:
    """Cut the configuration of a model to its first layers.

    Raises:
        ConfigurationError: it has no more than these.
    """
    whole = int(config.num_hidden_layers)
    if not 0 < count < whole:
        raise ConfigurationError(f"split={count}, and the model has {whole} layers: give 1 to {whole - 1}")
    for name, value in list(config.to_dict().items()):
        if isinstance(value, list | tuple) and len(value) == whole:
            setattr(config, name, value[:count])  # one entry for each layer, such as layer_types
    config.num_hidden_layers = count


def load_first_layers(
    name: str | os.PathLike[str],
    count: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: str = "auto",
    quantization: str | None = None,
) -> SlottedModel:
    """Load the first layers of a model.

    Args:
        name: as for `load_model`; a folder may hold these layers only.
        count: number of layers.
        dtype: of the weights.
        device: of the weights.
        kernels: as for `load_model`.
        quantization: as for `load_model`.

    Raises:
        ConfigurationError: the model has too few layers.
        ModelError: as `load_model`.
    """
    require_known(kernels, quantization)
    folder = resolve_model(name)
    if is_encoder_decoder(folder):
        raise UnsupportedModelError(f"model '{name}' has an encoder: only causal models are split by layers")
    label = f"{name}, first {count} layers"
    model = read_model(folder, dtype, device, reader=_FirstLayers(count))
    if kernels in ("auto", "native") and device.type == "cpu":
        try:
            return _slotted(lower_model(model, folder=folder, name=label, quantization=quantization).model, label)
        except NativeUnavailableError as reason:
            if kernels == "native" or quantization is not None:
                raise NativeUnavailableError(f"model '{label}' cannot run on native kernels: {reason}") from reason
            model = read_model(folder, dtype, device, reader=_FirstLayers(count))
    return _slotted(wrap_model(model, folder=folder, name=label, packed=True).model, label)


def _slotted(model: Any, name: str) -> SlottedModel:
    if not isinstance(model, SlottedModel):
        raise UnsupportedModelError(
            f"model '{name}' keeps its own cache, so its layers cannot be divided: send tokens, without split"
        )
    model.require_capture((model.num_layers,))
    return model
