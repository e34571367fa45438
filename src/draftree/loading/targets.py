"""What `LLM` takes for a model: names, folders, loaded models of transformers, models behind the seam."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.loading.choices import require_known
from draftree.loading.load import LoadedModel, load_model, wrap_model
from draftree.loading.tokenizers import load_tokenizer
from draftree.models.base import LanguageModel
from draftree.models.torch.static.buckets import Shapes
from draftree.text.tokenizer import Tokenizer


def load_target(
    model: Any,
    dtype: Any,
    device: str,
    *,
    kernels: str,
    quantization: str | None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """The target behind the model seam.

    Raises:
        ConfigurationError: options that cannot be honoured for what was given.
        ModelError: the model cannot be had or used.
    """
    require_known(kernels, quantization)
    if isinstance(model, str | os.PathLike):
        return load_model(
            model,
            dtype=dtype,
            device=device,
            kernels=kernels,
            quantization=quantization,
            trust_remote_code=trust_remote_code,
        )
    is_behind_seam = isinstance(model, LoadedModel | LanguageModel)
    if kernels == "native" or quantization is not None or (kernels == "graphs" and is_behind_seam):
        raise ConfigurationError(
            "kernels and quantization are chosen while a model is loaded, and this one is loaded already: "
            "give its name or its folder"
        )
    if dtype != "auto" or device != "auto":
        raise ConfigurationError("dtype and device belong to a loaded model already: leave them at 'auto'")
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, LanguageModel):
        return LoadedModel(model, None, (), type(model).__name__, why_torch="it computes its passes by itself")
    if not hasattr(model, "config") or not callable(model):
        raise ConfigurationError(
            f"model is a {type(model).__name__}: give a name, a path, a transformers model or a LanguageModel"
        )
    if kernels == "graphs":
        return wrap_model(model, shapes=Shapes())
    why = None if kernels == "torch" else "it was loaded before, and its weights stay as they are"
    return replace(wrap_model(model), why_torch=why)


def kernels_of_drafter(target: LoadedModel) -> str:
    """What computes the passes of a drafter's model: as the target's, where that was chosen.

    A target that could not run otherwise says why, and has no say about its drafter.
    """
    if target.kernels.startswith("graphs"):
        return "graphs"
    return "torch" if target.kernels == "torch" and target.why_torch is None else "auto"


def require_exact(loaded: LoadedModel) -> None:
    """Refuse a model whose logits depend on what they are computed beside.

    Raises:
        ConfigurationError: with the reason.
    """
    if loaded.model.is_exact:
        return
    reason = loaded.why_torch or "its passes run through torch"
    raise ConfigurationError(
        f"exact was asked for, but a pass of '{loaded.name}' over several rows may round differently from one over one "
        f"row: {reason}; leave exact out, or take a model, a device and a dtype that native kernels know"
    )


def tokenizer_of(loaded: LoadedModel, given: Any, *, trust_remote_code: bool = False) -> Tokenizer | None:
    """The tokenizer that was given, or the one that lies beside the weights.

    Raises:
        ConfigurationError: a name was given.
    """
    if isinstance(given, str | os.PathLike):
        raise ConfigurationError(
            f"tokenizer is {os.fspath(given)!r}: give a loaded one, such as AutoTokenizer.from_pretrained gives"
        )
    if given is not None:
        return given if isinstance(given, Tokenizer) else Tokenizer(given)
    if loaded.folder is None:
        return None
    return load_tokenizer(Path(loaded.folder), trust_remote_code=trust_remote_code)


def eos_ids_of(loaded: LoadedModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids of the tokens that end a text: those of the model's settings, or else the tokenizer's.

    Generation and benchmarks use this function, so that they end texts alike.

    Args:
        loaded: the target.
        tokenizer: the target's, if it has one.
    """
    eos = None if tokenizer is None else tokenizer.eos_token_id
    return loaded.eos_ids or (() if eos is None else (eos,))
