"""The first layers of a model as a model of their own: embedding, layers, final norm and output head.

A folder may hold these only (`write_first_layers`); its config.json says of how many layers the whole model is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.loading.encoder_decoder import is_encoder_decoder
from draftree.loading.lowering import lower_model
from draftree.loading.options import resolve_place
from draftree.loading.resolve import gguf_path, resolve_model
from draftree.loading.transformers_model import PART_OF, config_of, read_model, wrap_model
from draftree.models.kv.slotted import SlottedModel
from draftree.models.native.build import NativeUnavailableError
from draftree.models.torch.inspection import quiet
from draftree.options import ModelOptions
from draftree.weights.packed_checkpoint import quantization_of

__all__ = ["FirstLayers", "load_first_layers", "refuse_gguf", "require_split", "write_first_layers"]

COPIED = ("*token*", "vocab*", "merges*", "chat_template*")
"""Files of the tokenizer, beside what `save_pretrained` writes."""


class _FirstLayers:
    """Reader of the first layers; all other weights of the files are not read."""

    takes_parts = True

    def __init__(self, count: int) -> None:
        self._count = count

    def from_pretrained(self, folder: Path, **options: Any) -> Any:
        """Read the layers as `AutoModelForCausalLM` reads all."""
        from transformers import AutoModelForCausalLM

        config = config_of(folder)
        shorten(config.get_text_config(), self._count)
        trusts = options.pop("trust_remote_code", False)
        return AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=trusts, **options)


def shorten(config: Any, count: int) -> None:
    """Cut the configuration of a model to its first layers, or of a part that has no fewer."""
    _require_count(config, count, "the model")
    whole = int(config.num_hidden_layers)
    for name, value in list(config.to_dict().items()):
        if isinstance(value, list | tuple) and len(value) == whole:
            setattr(config, name, value[:count])  # one entry for each layer, such as layer_types
    config.num_hidden_layers = count


def _require_count(config: Any, count: int, label: str) -> None:
    """Check that a model has more than `count` layers, or a part of one as many."""
    whole = int(config.num_hidden_layers)
    most = whole - (getattr(config, PART_OF, None) is None)
    if not 0 < count <= most:
        kept = f"{label} has" if most < whole else "the folder holds the first"
        allowed = f"give 1 to {most}" if most > 1 else "give 1" if most else "it cannot be divided"
        raise ConfigurationError(f"split={count}, and {kept} {whole} layer{'s' * (whole != 1)}: {allowed}")


def refuse_gguf(name: str | os.PathLike[str]) -> None:
    if gguf_path(name) is not None:
        raise UnsupportedModelError(
            f"model '{name}' is a GGUF file, which is not split by layers: use the model's folder of plain weights, or "
            "send tokens, without split"
        )


def require_split(name: str | os.PathLike[str], count: int) -> None:
    """Check, before any weights are read, that a server has layers left if devices run the first ones of a model."""
    _require_count(config_of(_causal_folder(name)).get_text_config(), count, f"model '{name}'")


def load_first_layers(options: ModelOptions, count: int) -> SlottedModel:
    folder = _causal_folder(options.model)
    label = f"{options.model}, first {count} layers"
    device, dtype = resolve_place(options)
    model = read_model(folder, dtype, device, reader=_FirstLayers(count))
    if options.allows_native and device.type == "cpu":
        try:
            return _slotted(
                lower_model(model, folder=folder, name=label, quantization=options.quantization).model, label
            )
        except NativeUnavailableError as reason:
            if options.requires_native:
                raise NativeUnavailableError(f"model '{label}' cannot run on native kernels: {reason}") from reason
            model = read_model(folder, dtype, device, reader=_FirstLayers(count))
    return _slotted(wrap_model(model, folder=folder, name=label, packed=True).model, label)


@dataclass(frozen=True, slots=True)
class FirstLayers:
    folder: Path  # where it is
    num_layers: int  # layers of the whole model
    num_bytes: int  # of its weights
    whole_bytes: int  # of all weights of the model, in the same types


def write_first_layers(name: str | os.PathLike[str], count: int, to: Path) -> FirstLayers:
    """Write a folder with the first layers of a model, its embedding, final norm, output head and tokenizer.

    The weights keep their types. `load_first_layers` reads the folder; as a model of its own it is refused.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigurationError(f"'{to}' exists and is not an empty folder: name a new one")
    folder = _causal_folder(name)
    if quantization_of(folder) is not None:
        raise UnsupportedModelError(f"model '{name}' has packed weights: only plain ones are divided")
    config = config_of(folder).get_text_config()
    whole = int(getattr(config, PART_OF, config.num_hidden_layers))
    files = list(folder.glob("*.safetensors")) or list(folder.glob("pytorch_model*.bin"))
    whole_bytes = sum(path.stat().st_size for path in files)
    model = read_model(folder, "auto", torch.device("cpu"), reader=_FirstLayers(count))
    for part in (model.config, model.config.get_text_config()):
        setattr(part, PART_OF, whole)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}-") as scratch:
        made = Path(scratch) / "part"
        with quiet():
            model.save_pretrained(made)
        for path in {path for pattern in COPIED for path in folder.glob(pattern) if path.is_file()}:
            shutil.copyfile(path, made / path.name)
        size = sum(path.stat().st_size for path in made.glob("*.safetensors"))
        if to.exists():
            to.rmdir()
        made.rename(to)
    return FirstLayers(to, whole, size, whole_bytes)


def _causal_folder(name: str | os.PathLike[str]) -> Path:
    refuse_gguf(name)
    folder = resolve_model(name)
    if is_encoder_decoder(folder):
        raise UnsupportedModelError(f"model '{name}' has an encoder: only causal models are split by layers")
    return folder


def _slotted(model: Any, name: str) -> SlottedModel:
    if not isinstance(model, SlottedModel):
        raise UnsupportedModelError(
            f"model '{name}' keeps its own cache, so its layers cannot be divided: send tokens, without split"
        )
    model.require_capture((model.num_layers,))
    return model
