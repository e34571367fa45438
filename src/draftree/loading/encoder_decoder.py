"""Encoder-decoder models: recognition before loading, the class that reads them, and wrapping with the self-check."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

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
    inner = getattr(model, "model", model)
    if isinstance(model, EncoderDecoder) or isinstance(inner, EncoderDecoder):
        return True
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


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


class SourceTraits(Protocol):
    """Facts about a drafter: its use of models and of sources."""

    @property
    def runs_model(self) -> bool:
        """Whether it runs passes of a model."""

    @property
    def reads_sources(self) -> bool:
        """Whether the models that it runs read the source."""


def require_drafter(name: str, traits: SourceTraits) -> None:
    if traits.runs_model and not traits.reads_sources:
        raise ConfigurationError(
            f"drafter '{name}' runs a part of a model or a head, and the target is an encoder-decoder model, whose "
            "source it cannot read: use model:NAME with a model of the same tokenizer, or suffix or ngram, which copy "
            "from the source too"
        )
