"""A model's own forward pass over prompts, with the inputs that `generate` of transformers prepares.

A model called with token ids only may number positions differently than under `generate`, which passes positions to
every forward that accepts them: Roberta-like decoders then start at 0 and not after the index of their padding token.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.torch.cache_argument import CACHE_NAMES, cache_name

CHECKED_PADS, CHECKED_TOKENS = 3, 6
"""Padding and a short prompt, which show whether padding changes logits."""
TOLERANCE = 1e-4
"""Maximum difference due to padding, relative to the range of the logits; 0.08 in half precision."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrompt:
    """Prompt prefilled by a model's own forward pass, except its last token.

    Attributes:
        layers: keys and values of each layer, shape (kv_heads, length, dim), with padding if it is kept.
        length: number of tokens without padding.
        num_pads: number of padding tokens that are kept before them.
        offset: position minus index of a token; not 0 if an image takes fewer positions than tokens.
        logits: logits of the last token, shape (vocab,).
    """

    layers: dict[int, tuple[Tensor, Tensor]]
    length: int
    num_pads: int
    offset: int
    logits: Tensor


def takes_positions(model: Any) -> bool:
    """Return whether `generate` passes positions to this model's forward."""
    return "position_ids" in inspect.signature(model.forward).parameters and not model.config.is_encoder_decoder


def prompt_inputs(
    model: Any, input_ids: Tensor, *, mask: Tensor | None = None, cache: Any = None, **given: Any
) -> dict[str, Any]:
    """Return the inputs of the first forward pass of `generate`.

    Args:
        model: a `…ForCausalLM` or `…ForConditionalGeneration`.
        input_ids: shape (batch, length).
        mask: False for padding, same shape; None for no padding.
        cache: transformers' cache that the pass fills; None for none.
        **given: other inputs, such as images; `position_ids` if known, and `use_cache`.
    """
    if given.get("position_ids") is None and takes_positions(model):
        known = torch.ones_like(input_ids) if mask is None else mask
        given["position_ids"] = positions_of(model, input_ids, known, given)
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    if prepare is None:
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": mask, **given}
    else:
        given[cache_name(prepare)] = cache
        inputs = prepare(input_ids, attention_mask=mask, is_first_iteration=True, **given)
    # a model's own forward may use another name than the method that it inherits from transformers
    inputs = {name: value for name, value in inputs.items() if value is not None and name not in CACHE_NAMES}
    return inputs if cache is None else {**inputs, cache_name(model.forward): cache}


def positions_of(model: Any, input_ids: Tensor, mask: Tensor, given: dict[str, Any]) -> Tensor:
    """Return the positions that `generate` uses, shape (batch, length) or (kinds, batch, length)."""
    prepare = getattr(model, "_prepare_position_ids_for_generation", None)
    if prepare is None:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)
    found: Tensor = prepare(input_ids, {**given, "attention_mask": mask})
    return found


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


def offsets_of(positions: Tensor | None, lengths: list[int]) -> list[int]:
    """Return position minus index of each row's last token.

    Args:
        positions: positions of the prompts, shape (batch, length) or (kinds, batch, length); None if the model numbers
            positions itself.
        lengths: number of tokens of each row without padding.

    Raises:
        UnsupportedModelError: the last token of a row has several positions.
    """
    if positions is None:
        return [0] * len(lengths)
    ends = positions[..., -1].reshape(-1, positions.shape[-2])
    if ends.shape[0] > 3:
        ends = ends[-3:]  # the first of four kinds is for masks, the others are for the rotation
    if not bool((ends == ends[:1]).all()):
        raise UnsupportedModelError("the last token of the prompt has several positions, as tokens of images have")
    return [int(end) - (length - 1) for end, length in zip(ends[0].expand(len(lengths)), lengths, strict=True)]
