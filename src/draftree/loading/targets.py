"""The model argument of `LLM`: names, folders, loaded transformers models, and `LanguageModel` objects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.loading.choices import require_known, require_kv_dtype
from draftree.loading.generation_config import sampling_of
from draftree.loading.load import LoadedModel, load_model, wrap_model
from draftree.loading.tokenizers import load_tokenizer
from draftree.models.base import LanguageModel
from draftree.models.torch.static import Shapes
from draftree.sampling.params import NEUTRAL
from draftree.text.tokenizer import Tokenizer


def load_target(
    model: Any,
    dtype: Any,
    device: str,
    *,
    kernels: str,
    quantization: str | None,
    trust_remote_code: bool = False,
    offload: str | int | None = None,
    kv_dtype: str | None = None,
) -> LoadedModel:
    """Load or wrap the target model.

    Raises:
        ConfigurationError: an option is not possible for this kind of model.
        ModelError: the model cannot be found or used.
    """
    require_known(kernels, quantization)
    require_kv_dtype(kv_dtype, kernels, device)
    if isinstance(model, str | os.PathLike):
        return load_model(
            model,
            dtype=dtype,
            device=device,
            kernels=kernels,
            quantization=quantization,
            trust_remote_code=trust_remote_code,
            offload=offload,
            kv_dtype=kv_dtype,
        )
    if offload is not None:
        raise ConfigurationError(
            "offload is chosen when a model is loaded, and this one is already loaded: give its name or its folder"
        )
    if kv_dtype is not None:
        raise ConfigurationError(
            "kv_dtype is chosen when a model is loaded, and this one is already loaded: give its name or its folder"
        )
    is_wrapped = isinstance(model, LoadedModel | LanguageModel)
    if kernels == "native" or quantization is not None or (kernels == "graphs" and is_wrapped):
        raise ConfigurationError(
            "kernels and quantization are chosen when a model is loaded, and this one is already loaded: "
            "give its name or its folder"
        )
    if dtype != "auto" or device != "auto":
        raise ConfigurationError("dtype and device belong to a loaded model already: leave them at 'auto'")
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, LanguageModel):
        return LoadedModel(model, None, (), type(model).__name__, why_torch="it implements its own passes")
    if not hasattr(model, "config") or not callable(model):
        raise ConfigurationError(
            f"model is a {type(model).__name__}: give a name, a path, a transformers model or a LanguageModel"
        )
    settings = getattr(model, "generation_config", None)
    sampling = NEUTRAL if settings is None else sampling_of(settings.to_diff_dict(), "its generation_config")
    if kernels == "graphs":
        return replace(wrap_model(model, shapes=Shapes()), sampling=sampling)
    why = None if kernels == "torch" else "it was loaded before, and its weights stay unchanged"
    return replace(wrap_model(model), why_torch=why, sampling=sampling)


def kernels_of_drafter(target: LoadedModel) -> str:
    """Return the kernels of a drafter's model: the target's, if they were chosen explicitly.

    Fallback kernels of the target do not restrict its drafter.
    """
    if target.kernels.startswith("graphs"):
        return "graphs"
    return "torch" if target.kernels == "torch" and target.why_torch is None else "auto"


def require_exact(loaded: LoadedModel, *, asked: bool) -> None:
    """Raise for a model whose logits depend on the other rows of a pass, if exactness was asked for.

    Raises:
        ConfigurationError: the message gives the reason.
    """
    if loaded.model.is_exact or not asked:
        return
    reason = loaded.why_torch or "its passes run through torch"
    raise ConfigurationError(
        f"exact was requested, but a pass of '{loaded.name}' over several rows may round differently from one over one "
        f"row: {reason}; leave exact out, or use a model, a device and a dtype that native kernels support"
    )


def require_layers(layers: Sequence[int], target: LoadedModel) -> None:
    """Refuse a drafter that needs hidden states of layers that the target does not have.

    Raises:
        ConfigurationError: the message names the layer.
    """
    count = target.model.num_layers
    strange = [layer for layer in layers if not -count - 1 <= layer <= count]
    if strange:
        raise ConfigurationError(
            f"this drafter needs hidden states of layer {strange[0]}, but '{target.name}' has {count} layers "
            "that can be told apart: use another target, or another drafter"
        )
    if layers:
        target.model.require_capture([layer if layer >= 0 else count + 1 + layer for layer in layers])


def tokenizer_of(loaded: LoadedModel, given: Any, *, trust_remote_code: bool = False) -> Tokenizer | None:
    """Return the given tokenizer, or the one in the model's folder.

    Raises:
        ConfigurationError: a name was given.
    """
    if isinstance(given, str | os.PathLike):
        raise ConfigurationError(
            f"tokenizer is {os.fspath(given)!r}: give a loaded one, such as from AutoTokenizer.from_pretrained"
        )
    if given is not None:
        found = given if isinstance(given, Tokenizer) else Tokenizer(given)
        if loaded.tokenizer_sha is not None:
            from draftree.loading.remote import require_same_tokenizer

            require_same_tokenizer(found, loaded.tokenizer_sha)
        return found
    if loaded.folder is None:
        return None
    return load_tokenizer(Path(loaded.folder), trust_remote_code=trust_remote_code)


def eos_ids_of(loaded: LoadedModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return ids of the tokens that end a text: those of the model's settings, or else the tokenizer's.

    Generation and benchmarks use this function, so that they end texts alike.

    Args:
        loaded: the target.
        tokenizer: the target's, if it has one.
    """
    eos = None if tokenizer is None else tokenizer.eos_token_id
    return loaded.eos_ids or (() if eos is None else (eos,))
