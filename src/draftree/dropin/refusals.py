"""Refusals of `generate` calls: each names the argument, the reason and an alternative.

transformers (5.16 to 5.24) drops five arguments of `generate` if `custom_generate` is a callable. They are bound to
the callable instead (`functools.partial`). `refuse_unbound` makes an error of those that would be lost without effect.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationMixin
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.models.torch.inspection import CACHE_NAMES

WITHOUT = "leave custom_generate out for this call"

_UNSUPPORTED: dict[str, str] = {
    "assistant_early_exit": "drafting with the model's own first layers by this argument is not offered",
    "use_mtp": "heads that predict several tokens are not read",
    "speculation_type": "this kind of assistant is not read",
    "assistant_ensemble_weight": "it changes the distribution of the text, which Draftree never does",
    "cache_config": "keys and values lie in memory of Draftree's own, which has no such options",
    "prefill_chunk_size": "long prompts are read in chunks of Draftree's own size",
    "compile_config": "passes are not compiled",
    "low_memory": "there is no low-memory mode",
    "output_attentions": "attention weights are not kept",
    "output_hidden_states": "hidden states are not kept",
}
"""Settings of the generation config, off when None or False, and why they are refused."""

_KNOWN_INPUTS = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHE_NAMES})


_TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids")
"""Say which tokens stand for images; of no effect where they are zero throughout."""
_WITH_IMAGES = ("pixel", "image", "patch", "spatial_shapes", "num_", "high_res_pixel", *_TOKEN_KINDS)
"""How the names of inputs begin that go with images."""
_OTHER_MEDIA = ("video", "audio", "input_features", "input_values", "speech")
"""Parts of the names of inputs that hold what is not read."""


def how_to_bind(*names: str) -> str:
    """Return the part of a message on how to pass arguments that transformers drops."""
    bound = ", ".join(f"{name}=..." for name in names)
    return (
        f"transformers does not pass {' and '.join(names)} to a custom_generate callable; "
        f"use custom_generate=functools.partial(draftree.generate, {bound})"
    )


def refuse_unbound(model: Any) -> None:
    """Raise if the running `model.generate` was given an argument that transformers drops without a message.

    It reads three local variables of the calling `generate` and takes no value from there. The other two dropped
    arguments, the tokenizers, need no check: what depends on them raises where they are missing.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame.f_code is not code or frame.f_locals["self"] is not model:
        return
    for name in ("streamer", "assistant_model"):
        if frame.f_locals[name] is not None:
            raise ConfigurationError(f"{name} was given to generate: {how_to_bind(name)}")
    refuse_sync(model, asked=bool(frame.f_locals["synced_gpus"]))


def refuse_sync(model: Any, *, asked: bool) -> None:
    """Raise for `synced_gpus=True`, and for sharded weights, where transformers sets it."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if asked or (several and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))):
        raise ConfigurationError(
            "synced_gpus=True (given, or set for sharded weights) is not supported: each process decodes at its own "
            f"pace; {WITHOUT}"
        )


def refuse_model(model: Any) -> None:
    """Raise where the model is in a state in which its text cannot be the one that generate writes."""
    if model.training:
        raise ConfigurationError(
            f"{type(model).__name__} is in training mode, where dropout makes every pass another one: call "
            "model.eval() first"
        )


def refuse_config(config: Any, *, without_cache: bool = False) -> None:
    """Raise if the generation config has a setting that Draftree does not support.

    `without_cache`: the model's own settings say `use_cache=False`, as those of MPT do; the text is the same.
    """
    mode = str(config.get_generation_mode().value)
    if mode not in ("greedy_search", "sample", "assisted_generation", "beam_search", "beam_sample"):
        raise ConfigurationError(
            f"generation mode '{mode.replace('_', ' ')}' (num_beams={config.num_beams}) was asked for, but Draftree "
            f"writes texts greedily, by sampling or with beams: leave the setting of this mode out, or {WITHOUT}"
        )
    for name, reason in _UNSUPPORTED.items():
        value = getattr(config, name, None)
        if value is not None and value is not False:
            raise ConfigurationError(f"{name}={value!r} cannot be honoured: {reason}; leave it out, or {WITHOUT}")
    if config.use_cache is False and not without_cache:
        raise ConfigurationError(
            "use_cache=False cannot be honoured: Draftree always keeps keys and values; "
            f"set use_cache=True, or {WITHOUT}"
        )
    if config.cache_implementation not in (None, "dynamic"):
        raise ConfigurationError(
            f"cache_implementation={config.cache_implementation!r} cannot be honoured: keys and values lie in "
            f"preallocated memory of Draftree's own; leave it out, or {WITHOUT}"
        )


def refuse_lookbehind(config: Any, where: str) -> None:
    """Raise where windows for aligning two tokenizers are set to other numbers than transformers' own."""
    defaults = type(config)._get_default_generation_params()
    for name in ("target_lookbehind", "assistant_lookbehind"):
        value = getattr(config, name, None)
        if value is not None and value != defaults.get(name):
            raise ConfigurationError(
                f"{name}={value!r} of {where} cannot be honoured: Draftree aligns two tokenizers by their bytes and "
                "widens its window until both agree; leave it out"
            )


def refuse_inputs(input_ids: Tensor, inputs: Mapping[str, Any], *, max_length: int, context: int) -> None:
    """Raise where inputs are more than token ids with left padding, or do not fit the model's context.

    `max_length` counts padding, prompt and output of a row; `context` are the positions that the model knows.
    """
    _refuse_strange(inputs)
    refuse_cache(inputs)
    if inputs.get("logits_to_keep") not in (None, 1):
        raise InvalidRequestError("logits_to_keep cannot be honoured: what is needed is computed; leave it out")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise InvalidRequestError(f"input_ids has shape {tuple(input_ids.shape)}: give (batch, length) with a token")
    pads = num_pads(input_ids, inputs.get("attention_mask"))
    if not has_images(inputs):
        _refuse_positions(inputs.get("position_ids"), pads, input_ids)
    longest = max_length - min(pads)
    if longest > context:
        room = context - (input_ids.shape[1] - min(pads))
        raise InvalidRequestError(
            f"prompt and output may have {longest} tokens, but the model's context holds {context}: "
            + (f"set max_new_tokens to {room} at most" if room > 0 else "shorten the prompt")
        )


def refuse_cache(inputs: Mapping[str, Any]) -> None:
    """Raise if the call passes a cache of its own; an empty one that `generate` created is ignored."""
    for name in CACHE_NAMES:
        cache = inputs.get(name)
        if getattr(cache, "_is_user_defined", False) or (cache is not None and _is_filled(cache)):
            raise InvalidRequestError(
                f"{name} is not supported: Draftree stores keys and values in its own memory; pass the whole prompt "
                f"without it, or {WITHOUT}"
            )


def _is_filled(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:  # no layer of it counts tokens
        return bool(cache.has_previous_state())


def has_images(inputs: Mapping[str, Any]) -> bool:
    """Whether the prompts hold images, as pixels or encoded."""
    encoded = inputs.get("mm_encoder_outputs") or {}
    return encoded.get("image") is not None or any(
        value is not None for name, value in inputs.items() if name.startswith("pixel_values")
    )


def _refuse_strange(inputs: Mapping[str, Any]) -> None:
    """Raise where there is more than token ids with a mask, and images with what goes with them."""
    names = {name for name, value in inputs.items() if name not in _KNOWN_INPUTS and value is not None}
    names -= {name for name in _TOKEN_KINDS if name in names and not bool(inputs[name].any())}
    encoded = {name for name, value in (inputs.get("mm_encoder_outputs") or {}).items() if value is not None}
    names.discard("mm_encoder_outputs")
    others = {name for name in names | encoded if any(word in name for word in _OTHER_MEDIA)}
    if others:
        raise InvalidRequestError(
            f"{', '.join(sorted(others))} cannot be honoured: of other inputs than text Draftree reads images only, "
            f"neither video nor audio; {WITHOUT}"
        )
    if has_images(inputs):
        names = {name for name in names if not name.startswith(_WITH_IMAGES)}
    if names:
        raise InvalidRequestError(
            f"{', '.join(sorted(names))} cannot be honoured: Draftree reads token ids with an attention mask, and "
            f"images; {WITHOUT}"
        )


def num_pads(input_ids: Tensor, mask: Tensor | None) -> list[int]:
    """How many tokens of padding each row begins with."""
    if mask is None:
        return [0] * input_ids.shape[0]
    seen = mask != 0
    if seen.shape != input_ids.shape or not bool(seen[:, -1].all()) or bool((seen[:, :-1] & ~seen[:, 1:]).any()):
        raise InvalidRequestError(
            "attention_mask hides tokens after others that it shows, and Draftree takes padding at the left only: "
            "set padding_side='left' when the tokenizer is loaded"
        )
    return (~seen).sum(dim=1).tolist()


def _refuse_positions(positions: Tensor | None, pads: list[int], input_ids: Tensor) -> None:
    if positions is None:
        return
    length = input_ids.shape[1]
    plain = torch.arange(length, device=positions.device)
    if positions.dim() in (2, 3) and positions.shape[-1] == length:
        kinds = positions.expand(-1 if positions.dim() == 3 else 1, len(pads), -1)
        rows = ((row[skipped:], skipped) for kind in kinds for row, skipped in zip(kind, pads, strict=True))
        if all(torch.equal(row, plain[: length - skipped]) for row, skipped in rows):
            return
    raise InvalidRequestError(
        f"position_ids cannot be honoured: Draftree counts each row's tokens from 0 after its padding; leave them "
        f"out, or {WITHOUT}"
    )
