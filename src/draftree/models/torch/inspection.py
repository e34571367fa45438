"""What is read of a transformers model: context length, identity, cache argument, kept state, its own forward pass."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError


@contextmanager
def quiet(*, advice_of: torch.device | None = None) -> Iterator[None]:
    """Suppress progress bars, load reports and advice of transformers inside the block.

    `advice_of`: a device for whose passes advice may hold; a CPU has none of the kernels that it names. None for any.
    """
    from transformers.utils import logging as library

    if advice_of is not None and advice_of.type != "cpu":
        yield
        return
    was_enabled, verbosity = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if was_enabled:
            library.enable_progress_bar()


CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


def accepts_cache(function: Callable[..., Any]) -> bool:
    return not inspect.signature(function).parameters.keys().isdisjoint(CACHE_NAMES)


def cache_name(function: Callable[..., Any]) -> str:
    """Return the name of a function's argument for stored keys and values; transformers' name if **kwargs hides it.

    transformers calls it `cache` from version 5.24 on and `past_key_values` before. A model's own code may use the
    other name, so the signature decides. The old name still works in 5.24, but raises a warning.
    """
    from transformers import GenerationMixin

    shown = function if accepts_cache(function) else GenerationMixin.prepare_inputs_for_generation
    parameters = inspect.signature(shown).parameters
    return next(name for name in CACHE_NAMES if name in parameters)


logger = logging.getLogger(__name__)

UNBOUNDED = 1 << 20  # context length of models that have no limit, such as those with linear biases


def context_length(config: Any) -> int:
    """Return the number of positions whose keys stay valid, whatever follows.

    A model with "longrope" scaling rotates all its keys by other angles once a pass exceeds its original context:
    stored keys would be invalid, and one long sequence would change the others of its batch. The context ends there.
    """
    names = ("max_position_embeddings", "max_seq_len")
    known = next((int(value) for name in names if (value := getattr(config, name, None))), UNBOUNDED)
    scaled = [rope for rope in rope_settings(config) if rope.get("rope_type") == "longrope"]
    limit = min([known, *(int(rope["original_max_position_embeddings"]) for rope in scaled)])
    if limit < known:
        logger.info("context limited to %d of %d positions: beyond it 'longrope' changes stored keys", limit, known)
    return limit


def turning_length(config: Any) -> int | None:
    """Return the length beyond which rotary angles of all keys depend on the length of the text; None if never.

    Under `generate` stored keys keep the angles of the pass that computed them, one pass per token. Passes over drafts
    would give them other angles.
    """
    limits = []
    for rope in rope_settings(config):
        if rope.get("rope_type") == "longrope":
            limits.append(int(rope["original_max_position_embeddings"]))
        elif rope.get("rope_type") == "dynamic":
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)


def rope_settings(config: Any) -> list[Mapping[str, Any]]:
    """Return the rotary settings: one for all layers, or one for each layer type."""
    settings = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in settings:
        return [settings]
    return [rope for rope in settings.values() if isinstance(rope, Mapping)]


SAMPLES = 16  # number of sampled values of each parameter; fine-tuned models differ in some of them


def fingerprint(model: Any) -> str:
    """Return a hash of a model, the same in every dtype; empty if some of its weights are not in memory."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return ""
    return fingerprint_of(type(model).__name__, samples_of(model))


@torch.no_grad()
def samples_of(model: Any) -> dict[str, bytes]:
    """Return shape and samples of each parameter, by name; all processes that share the weights call it."""
    samples = {}
    for name, parameter in model.named_parameters():
        whole = whole_tensor(parameter)
        flat = whole.reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        values = flat[::step][:SAMPLES].to("cpu", torch.bfloat16).view(torch.int16)
        samples[name] = f"{name} {tuple(whole.shape)}".encode() + values.numpy().tobytes()
    return samples


def fingerprint_of(kind: str, samples: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256(kind.encode())
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()[:16]


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor that processes share as a whole, gathered by all of them; any other as it is. Detached."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor.detach()
    with torch.inference_mode(False), torch.no_grad():  # a divided tensor of inference mode cannot be gathered
        gathered: Tensor = gather()
    return gathered.detach()


KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
"""Layer types whose state is the keys and values of each token."""
PLAIN_CACHES = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})
"""Caches of such layers in transformers; the last one is for layers that read keys and values of other layers."""


def layer_types(config: Any) -> frozenset[str]:
    return frozenset(getattr(config, "layer_types", None) or ())


def require_keys_only(model: Any) -> None:
    """Check that what a model keeps of a text are keys and values of each token."""
    kind, config = type(model).__name__, model.config.get_text_config()
    kinds = layer_types(config)
    attends_only = bool(kinds) and kinds <= KNOWN_LAYER_TYPES
    if getattr(model, "_is_stateful", False) and not attends_only:
        raise UnsupportedModelError(f"{kind} keeps states outside of transformers' cache")
    strange = {type(layer).__name__ for layer in cache_layers(config)} - PLAIN_CACHES
    if strange:
        raise UnsupportedModelError(f"{kind} keeps {', '.join(sorted(strange))} beside keys and values")


def cache_windows(config: Any) -> dict[int, int]:
    """Return the sliding window in tokens of each layer for which `generate` keeps only the last keys and values."""
    layers = enumerate(cache_layers(config))
    return {place: int(layer.sliding_window) for place, layer in layers if getattr(layer, "is_sliding", False)}


def cache_layers(config: Any) -> list[Any]:
    """Return the layers of the cache that `generate` creates for a configuration; empty if it cannot create one."""
    from transformers import DynamicCache

    try:
        return list(DynamicCache(config=config).layers)
    except Exception:  # no configuration from which a cache can be created: the self-check decides
        return []


CHECKED_PADS, CHECKED_TOKENS = 3, 6  # padding and a short prompt, which show whether padding changes logits
TOLERANCE = 1e-4  # maximum difference due to padding, relative to the range of the logits; 0.08 in half precision


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrompt:
    """Prompt prefilled by a model's own forward pass, except its last token."""

    # keys and values of each layer, shape (kv_heads, length, dim), with padding if it is kept
    layers: dict[int, tuple[Tensor, Tensor]]
    length: int  # number of tokens without padding
    num_pads: int  # number of padding tokens that are kept before them
    offset: int  # position minus index of a token; not 0 if an image takes fewer positions than tokens
    logits: Tensor  # logits of the last token, shape (vocab,)
    cache: Any = None  # what its model needs beside that, or instead


def takes_positions(model: Any) -> bool:
    """Return whether `generate` passes positions to this model's forward."""
    return "position_ids" in inspect.signature(model.forward).parameters and not model.config.is_encoder_decoder


def prompt_inputs(
    model: Any, input_ids: Tensor, *, mask: Tensor | None = None, cache: Any = None, **extra_inputs: Any
) -> dict[str, Any]:
    """Return the inputs of the first forward pass of `generate`.

    `input_ids`: shape (batch, length). `mask`: False for padding, same shape; None for no padding. `cache`:
    transformers' cache that the pass fills; None for none.

    A model called with token ids only may number positions differently than under `generate`, which passes
    positions to every forward that accepts them: Roberta-like decoders then start at 0 and not after the index of
    their padding token.
    """
    if extra_inputs.get("position_ids") is None and takes_positions(model):
        known = torch.ones_like(input_ids) if mask is None else mask
        extra_inputs["position_ids"] = positions_of(model, input_ids, known, extra_inputs)
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    if prepare is None:
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask, **extra_inputs}
    else:
        extra_inputs[cache_name(prepare)] = cache
        inputs = prepare(input_ids, attention_mask=mask, is_first_iteration=True, **extra_inputs)
    read = inputs.get("input_ids")
    if read is not None and read.shape[1] > input_ids.shape[1]:
        raise UnsupportedModelError(
            f"{type(model).__name__} predicts a token in place of a mask that it appends to the text, and not from the "
            "tokens before it: use a model that was trained to continue a text"
        )
    # a model's own forward may use another name than the method that it inherits from transformers
    others = CACHE_NAMES if "logits_to_keep" in extra_inputs else (*CACHE_NAMES, "logits_to_keep")
    inputs = {name: value for name, value in inputs.items() if value is not None and name not in others}
    return inputs if cache is None else {**inputs, cache_name(model.forward): cache}


def positions_of(model: Any, input_ids: Tensor, mask: Tensor, extra_inputs: dict[str, Any]) -> Tensor:
    """Return the positions that `generate` uses, shape (batch, length) or (kinds, batch, length)."""
    prepare = getattr(model, "_prepare_position_ids_for_generation", None)
    if prepare is None:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)
    return prepare(input_ids, {**extra_inputs, "attention_mask": mask})


@torch.inference_mode()
def padding_counts(model: Any) -> bool:
    """Return whether padding before a prompt changes its logits."""
    vocab = int(model.config.get_text_config().vocab_size)
    ids = torch.tensor([[(11 + 5 * place) % vocab for place in range(CHECKED_TOKENS)]], device=model.device)
    pads = ids.new_full((1, CHECKED_PADS), int(getattr(model.config, "pad_token_id", None) or 0))
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(ids)], dim=1)
    alone = model(**prompt_inputs(model, ids, use_cache=False)).logits[0].float()
    inputs = prompt_inputs(model, torch.cat([pads, ids], dim=1), mask=mask, use_cache=False)
    padded = model(**inputs).logits[0, CHECKED_PADS:].float()
    accepted = TOLERANCE if next(model.parameters()).dtype in (torch.float32, torch.float64) else 8e-2
    return not float((padded - alone).abs().max()) <= accepted * float(alone.amax() - alone.amin())


def offsets_of(positions: Tensor | None, lengths: list[int], width: int) -> list[int]:
    """Return position minus index of each row's last token.

    `positions`: (batch, length) or (kinds, batch, length); None if the model numbers all tokens itself, padding
    included. `width`: tokens of a row with its padding.
    """
    if positions is None:
        return [width - length for length in lengths]
    ends = positions[..., -1].reshape(-1, positions.shape[-2])
    if ends.shape[0] > 3:
        ends = ends[-3:]  # the first of four kinds is for masks, the others are for the rotation
    if not bool((ends == ends[:1]).all()):
        raise UnsupportedModelError("the last token of the prompt has several positions, as tokens of images have")
    return [int(end) - (length - 1) for end, length in zip(ends[0].expand(len(lengths)), lengths, strict=True)]
