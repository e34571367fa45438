"""Encoder-decoder models: recognition before loading, the class that reads them, and wrapping with the self-check."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.core.files import JsonError, expanded, read_json
from draftree.loading.resolve import PATH_LIKE
from draftree.models.source import EncoderDecoder
from draftree.options import ModelOptions
from draftree.weights.cache import Cache


def is_encoder_decoder(folder: Path) -> bool:
    return _config(folder).get("is_encoder_decoder") is True


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        return read_json(folder / "config.json")
    except (FileNotFoundError, JsonError):
        return {}  # the reader of damaged settings refuses them


def is_encoder_decoder_target(model: Any) -> bool:
    """Return whether the model argument of `LLM` is an encoder-decoder model; nothing is fetched or loaded."""
    if isinstance(model, str | os.PathLike):
        path = expanded(os.fspath(model))
        if not path.is_dir() and isinstance(model, str) and not PATH_LIKE.match(model):
            path = Cache().folder(model)
        return is_encoder_decoder(path)
    is_wrapped = isinstance(getattr(model, "model", model), EncoderDecoder) or isinstance(model, EncoderDecoder)
    return is_wrapped or getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


def reader_class(folder: Path) -> Any:
    """Return the class of transformers that reads the encoder-decoder model of a folder."""
    import transformers

    speech = transformers.models.auto.modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    if str(_config(folder).get("model_type")) in speech:
        return transformers.AutoModelForSpeechSeq2Seq
    return transformers.AutoModelForSeq2SeqLM


def refuse_options(options: ModelOptions) -> None:
    if options.kernels == "graphs":
        raise ConfigurationError(
            f"model '{options.model}' is an encoder-decoder model, whose passes have no fixed shapes: leave kernels at "
            "'auto'"
        )
    if options.offload is not None:
        raise ConfigurationError(
            f"offload is {options.offload!r}, but '{options.model}' is an encoder-decoder model, whose weights stay in "
            "memory: leave offload out"
        )
