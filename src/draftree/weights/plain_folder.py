"""The configuration files of a plain model folder, which transformers reads besides weights and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftree.weights.gguf_file import Dtype

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["parameter_shapes", "save_configuration"]


def save_configuration(
    folder: Path,
    *,
    model_type: str,
    model_class: str,
    settings: Mapping[str, Any],
    dtype: Dtype,
    stop_ids: tuple[int, ...] = (),
) -> PretrainedConfig:
    """Write `config.json` and `generation_config.json`; text ends at `stop_ids`, or else at the end token."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.for_model(model_type, **settings, architectures=[model_class], dtype=dtype)
    config.save_pretrained(folder)
    ids = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in settings}
    if stop_ids:
        ids["eos_token_id"] = list(stop_ids)
    GenerationConfig(**ids).save_pretrained(folder)
    return config


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every parameter in a weights file of this configuration; shared ones once."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
