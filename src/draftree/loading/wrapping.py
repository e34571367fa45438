"""Wrapping of a transformers model as a checked `LanguageModel`."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import UnsupportedModelError
from draftree.loading.choices import has_native_bfloat16
from draftree.loading.encoder_decoder import wrap_encoder_decoder
from draftree.loading.endings import eos_ids_in
from draftree.loading.loaded import LoadedModel
from draftree.loading.reading import first_line
from draftree.models.check import ReferenceLogits, check, reference_logits, rounds_alike
from draftree.models.torch.hf import HFModel
from draftree.models.torch.hf_cache import CachedModel
from draftree.models.torch.inspection import fingerprint
from draftree.models.torch.packing import can_pack, pack
from draftree.models.torch.static import Shapes

logger = logging.getLogger(__name__)

ROW_BUCKETS = (2,)
"""In bfloat16 a pass over one row uses other kernels than a pass over two; two rows cost the same if the
processor has bfloat16 instructions."""


def wrap_checked(model: Any, name: str, *, shapes: Shapes | None = None) -> HFModel | CachedModel:
    """Return a checked model: with our attention if it is exact there, else with transformers' own cache.

    Args:
        model: a `…ForCausalLM` in evaluation mode; its attention implementation is replaced if ours is used.
        name: name in messages.
        shapes: fixed shapes of its passes, if our attention is used.

    Raises:
        UnsupportedModelError: its architecture is not supported; the message gives the reason.
    """
    kind = type(model).__name__
    implementation = model.config._attn_implementation
    try:
        reference = reference_logits(model)  # before the attention is replaced
    except Exception as error:  # a model's own code may raise anything
        raise UnsupportedModelError(
            f"{kind} fails in its own forward pass ({first_line(error)}): its architecture is not supported"
        ) from error
    try:
        ours = HFModel(model, row_buckets=row_buckets(model), shapes=shapes)
        result = check(ours, reference)
    except UnsupportedModelError as reason:
        logger.info("%s: %s; trying transformers' own cache, chains only", name, reason)
    except Exception as error:  # as above, now with our attention in it
        logger.warning("%s: our attention fails here (%s); trying transformers' own cache", name, first_line(error))
    else:
        if result.chains_ok:
            ours.supports_trees, ours.self_check = result.trees_ok, result
            if not result.trees_ok:
                logger.warning("%s: trees are not scored exactly (error %.1e): chains only", name, result.tree_error)
            # other shapes use other kernels: exactness of one small tree is verified for larger ones
            ours.is_exact = shapes is not None and result.is_exact and rounds_alike(ours)
            return ours
        logger.warning("%s: our attention is not exact here (error %.1e)", name, result.chain_error)
    if model._can_set_attn_implementation():
        model.set_attn_implementation(implementation)
    return _wrap_with_cache(model, reference)


def _wrap_with_cache(model: Any, reference: ReferenceLogits) -> CachedModel:
    kind = type(model).__name__
    cached = CachedModel(model)
    try:
        result = check(cached, reference)
    except Exception as reason:  # as above
        logger.info("%s: fails token by token: %s", kind, first_line(reason))
        raise UnsupportedModelError(
            f"{kind} cannot continue from its stored keys and values, token by token: its architecture is not supported"
        ) from reason
    if not result.chains_ok:
        raise UnsupportedModelError(
            f"{kind} gives other logits token by token than in one pass (error {result.chain_error:.1e} of their "
            "spread): its architecture is not supported"
        )
    cached.self_check = result
    return cached


def row_buckets(model: Any) -> tuple[int, ...]:
    """Return the numbers of rows that passes of a transformers model are padded to; empty for no padding."""
    half = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    return ROW_BUCKETS if half and has_native_bfloat16(model.device) else ()


def wrap_model(
    model: Any, *, folder: Path | None = None, name: str = "", packed: bool = False, shapes: Shapes | None = None
) -> LoadedModel:
    """Wrap a transformers model as a `LanguageModel` and check it.

    Args:
        model: a `…ForCausalLM`.
        folder: folder of its files, if it was loaded from files.
        name: name in messages.
        packed: whether its float32 linear layers may be replaced by packed ones.
        shapes: run passes in these fixed shapes, as CUDA graphs on a GPU; None for exact shapes.

    Raises:
        UnsupportedModelError: its architecture is not supported; the message gives the reason.
    """
    model.eval().requires_grad_(False)
    if model.config.is_encoder_decoder:
        if shapes is not None:
            raise UnsupportedModelError(
                "kernels 'graphs' were requested, but an encoder-decoder model has none: use kernels 'torch'"
            )
        ours = wrap_encoder_decoder(model, name or type(model).__name__, packed=packed)
        return LoadedModel(ours, folder, eos_ids_in(model), name or type(model).__name__)
    known = None
    if packed and can_pack(model.device, next(model.parameters()).dtype):
        known = fingerprint(model)  # packed weights are not readable afterwards
        logger.info("%s: packed %d linear layers", name, pack(model))
    wrapped = wrap_checked(model, name, shapes=shapes)
    if known is not None:
        wrapped.fingerprint = known
    loaded = LoadedModel(wrapped, folder, eos_ids_in(model), name or type(model).__name__)
    if shapes is None:
        return loaded
    if not isinstance(wrapped, HFModel) or wrapped.static is None:
        raise UnsupportedModelError(
            f"kernels 'graphs' were requested, but {type(model).__name__} uses its own cache, whose shape "
            "changes from pass to pass: use kernels 'torch'"
        )
    why = wrapped.static.why_eager
    return replace(loaded, kernels="graphs" if why is None else f"graphs ({why})")
