"""Draft models by name, with their tokenizers: in this process, or in processes of their own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from draftree.drafters.base import LoadedDraftModel
from draftree.loading.apart import load_apart
from draftree.loading.load import LoadedModel, load_model
from draftree.loading.resolve import resolve_model
from draftree.loading.tokenizers import load_tokenizer
from draftree.models.native.build import NativeUnavailableError

__all__ = ["apart_reader", "model_reader"]

logger = logging.getLogger(__name__)


def model_reader(
    target: LoadedModel, dtype: Any, device: str, *, kernels: str, trust_remote_code: bool
) -> Callable[..., LoadedDraftModel]:
    """Return a function that loads a drafter's model from files.

    Its weights have 8 bits if the target's have and it has native kernels, or if that is requested: drafts never change
    a text.

    Args:
        target: the target.
        dtype: of the drafter's model.
        device: of the drafter's model.
        kernels: of the drafter's model.
        trust_remote_code: whether Python code in its folder may run.
    """

    def load(name: str, quantization: str | None) -> LoadedModel:
        return load_model(
            name,
            dtype=dtype,
            device=device,
            kernels=kernels,
            quantization=quantization,
            trust_remote_code=trust_remote_code,
        )

    def read(name: str, quantization: str | None = None) -> LoadedDraftModel:
        try:
            loaded = load(name, quantization or target.quantization)
        except NativeUnavailableError as reason:
            if quantization is not None or target.quantization is None:
                raise
            logger.info("drafter '%s' keeps its own weights: %s", name, reason)
            loaded = load(name, None)
        if loaded.kernels_note is not None and loaded.why_torch != target.why_torch:
            logger.warning("drafter '%s': %s", loaded.name, loaded.kernels_note)
        folder = loaded.folder
        own = None if folder is None else load_tokenizer(folder, trust_remote_code=trust_remote_code)
        return LoadedDraftModel(loaded.model, own, os.fspath(name))

    return read


def apart_reader(target_quantization: str | None, *, trust_remote_code: bool) -> Callable[..., LoadedDraftModel]:
    """Return a function that loads a drafter's model in a process of its own, on the CPU."""

    def read(name: str, quantization: str | None = None) -> LoadedDraftModel:
        folder = resolve_model(name)
        model = load_apart(
            name,
            threads=torch.get_num_threads(),
            quantization=quantization or target_quantization,
            must_quantize=quantization is not None,
            trust_remote_code=trust_remote_code,
        )
        return LoadedDraftModel(model, load_tokenizer(folder, trust_remote_code=trust_remote_code), name)

    return read
