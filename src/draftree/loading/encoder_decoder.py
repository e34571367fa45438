"""Encoder-decoder models: recognition before loading, the class that reads them, and wrapping with the self-check."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.core.paths import expanded
from draftree.loading.reading import first_line
from draftree.loading.resolve import PATH_LIKE
from draftree.models.check import check
from draftree.models.source import EncoderDecoder
from draftree.models.torch.seq2seq.model import HFEncoderDecoder
from draftree.models.torch.seq2seq.sources import reference_logits
from draftree.weights.cache import Cache

logger = logging.getLogger(__name__)

WHY_TORCH = "encoder-decoder models have no native kernels"


def is_encoder_decoder(folder: Path) -> bool:
    """Return whether the configuration in a model folder is that of an encoder-decoder model."""
    return _config(folder).get("is_encoder_decoder") is True


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, Mapping) else {}


def is_encoder_decoder_target(model: Any) -> bool:
    """Return whether the model argument of `LLM` is known to be an encoder-decoder model; nothing is fetched or loaded.

    Args:
        model: a name, a folder, a model of transformers, a `LanguageModel` or a `LoadedModel`.
    """
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
    if _config(folder).get("model_type") in speech:
        return transformers.AutoModelForSpeechSeq2Seq
    return transformers.AutoModelForSeq2SeqLM


def refuse_kernels(name: str, kernels: str, quantization: str | None) -> None:
    """Raise for kernels or a quantization that encoder-decoder models do not have.

    Raises:
        ConfigurationError: passes run through torch only.
    """
    if kernels in ("native", "graphs") or quantization is not None:
        raise ConfigurationError(
            f"model '{name}' is an encoder-decoder model, whose passes run through torch: leave kernels at 'auto' and "
            "quantization out"
        )


def require_drafter(name: str, *, runs_model: bool) -> None:
    """Raise for a drafter that cannot work with an encoder-decoder model.

    Args:
        name: the drafter.
        runs_model: whether it runs passes of a model.

    Raises:
        ConfigurationError: it runs a model, which does not see the source.
    """
    if runs_model:
        raise ConfigurationError(
            f"drafter '{name}' runs a model or a part of one, and the target is an encoder-decoder model, whose source "
            "it cannot read: use a drafter without a model, such as suffix or ngram, which copy from the source too"
        )


def wrap_encoder_decoder(model: Any, name: str) -> HFEncoderDecoder:
    """Return a checked model. One whose trees are not scored exactly is limited to chains.

    Args:
        model: a `…ForConditionalGeneration` in evaluation mode; its attention implementation is replaced.
        name: name in messages.

    Raises:
        UnsupportedModelError: its architecture is not supported; the message gives the reason.
    """
    kind, implementation = type(model).__name__, model.config._attn_implementation
    try:
        reference = reference_logits(model)  # before the attention is replaced
    except UnsupportedModelError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise UnsupportedModelError(
            f"{kind} fails in its own forward pass ({first_line(error)}): its architecture is not supported"
        ) from error
    try:
        ours = HFEncoderDecoder(model)
        result = check(ours, reference)
    except UnsupportedModelError:
        _restore(model, implementation)
        raise
    except Exception as error:  # as above, now with our attention in it
        _restore(model, implementation)
        raise UnsupportedModelError(
            f"{kind} fails with our attention in its decoder ({first_line(error)}): its architecture is not supported"
        ) from error
    if not result.chains_ok:
        _restore(model, implementation)
        raise UnsupportedModelError(
            f"{kind} gives other logits from stored keys and values than in one pass (error {result.chain_error:.1e} "
            "of their spread): its architecture is not supported"
        )
    ours.supports_trees, ours.self_check = result.trees_ok, result
    if not result.trees_ok:
        logger.warning("%s: trees are not scored exactly (error %.1e): chains only", name, result.tree_error)
    if ours.rules.note:
        logger.warning("%s", ours.rules.note)
    return ours


def _restore(model: Any, implementation: Any) -> None:
    if model._can_set_attn_implementation():
        model.set_attn_implementation(implementation)
