"""A model's own forward pass over prompts, with the inputs that `generate` of transformers makes for it.

A model called with token ids alone may count positions otherwise than under `generate`, which hands positions over to
every forward that takes them: Roberta-like decoders then begin at 0 and not behind their padding token.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError

CHECKED_PADS, CHECKED_TOKENS = 3, 6
"""Padding before a short prompt, and the prompt, by which it is seen whether padding counts."""
TOLERANCE = 1e-4
"""Largest difference that padding may make, as a share of the spread of the logits; in half precision 0.08."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrompt:
    """What a model's own forward pass has made of one prompt, all but its last token.

    Attributes:
        layers: keys and values of each layer, shape (kv_heads, length, dim), padding included where it is kept.
        length: tokens without the padding.
        num_pads: tokens of padding that are kept before them.
        offset: how far positions are ahead of places; other than 0 where an image takes fewer positions than tokens.
        logits: of the last token, shape (vocab,).
    """

    layers: dict[int, tuple[Tensor, Tensor]]
    length: int
    num_pads: int
    offset: int
    logits: Tensor


def takes_positions(model: Any) -> bool:
    """Whether `generate` hands positions over to this model's forward."""
    return "position_ids" in inspect.signature(model.forward).parameters and not model.config.is_encoder_decoder


def prompt_inputs(model: Any, input_ids: Tensor, *, mask: Tensor | None = None, **given: Any) -> dict[str, Any]:
    """Inputs of the first forward pass of `generate`.

    Args:
        model: a `…ForCausalLM` or `…ForConditionalGeneration`.
        input_ids: shape (batch, length).
        mask: which of them are no padding, same shape; None if all are.
        **given: other inputs, such as images; `position_ids` if they are known, and `use_cache`.
    """
    if given.get("position_ids") is None and takes_positions(model):
        known = torch.ones_like(input_ids) if mask is None else mask
        given["position_ids"] = positions_of(model, input_ids, known, given)
    prepare = getattr(model, "prepare_inputs_for_generation", None)
    if prepare is None:
        return {"input_ids": input_ids, **({} if mask is None else {"attention_mask": mask}), **given}
    given.setdefault("past_key_values", None)
    inputs: dict[str, Any] = prepare(input_ids, attention_mask=mask, is_first_iteration=True, **given)
    return {name: value for name, value in inputs.items() if value is not None}


def positions_of(model: Any, input_ids: Tensor, mask: Tensor, given: dict[str, Any]) -> Tensor:
    """Positions that `generate` makes, shape (batch, length), or (kinds, batch, length) where there are several."""
    prepare = getattr(model, "_prepare_position_ids_for_generation", None)
    if prepare is None:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)
    found: Tensor = prepare(input_ids, {**given, "attention_mask": mask})
    return found


@torch.inference_mode()
def padding_counts(model: Any) -> bool:
    """Whether a prompt has other logits behind padding than alone, as where padding takes positions."""
    vocab = int(model.config.get_text_config().vocab_size)
    ids = torch.tensor([[(11 + 5 * place) % vocab for place in range(CHECKED_TOKENS)]], device=model.device)
    pads = ids.new_full((1, CHECKED_PADS), int(getattr(model.config, "pad_token_id", None) or 0))
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(ids)], dim=1)
    alone = model(**prompt_inputs(model, ids, use_cache=False)).logits[0].float()
    inputs = prompt_inputs(model, torch.cat([pads, ids], dim=1), mask=mask, use_cache=False)
    behind = model(**inputs).logits[0, CHECKED_PADS:].float()
    accepted = TOLERANCE if next(model.parameters()).dtype in (torch.float32, torch.float64) else 8e-2
    return not float((behind - alone).abs().max()) <= accepted * float(alone.amax() - alone.amin())


def offsets_of(positions: Tensor | None, lengths: list[int]) -> list[int]:
    """How far each row's positions are ahead of its places at its end.

    Args:
        positions: of the prompts, shape (batch, length) or (kinds, batch, length); None where the model counts itself.
        lengths: tokens of each row without its padding.

    Raises:
        UnsupportedModelError: the last token of a row has several positions.
    """
    if positions is None:
        return [0] * len(lengths)
    ends = positions[..., -1].reshape(-1, positions.shape[-2])
    if ends.shape[0] > 3:
        ends = ends[-3:]  # before those of rotation stand those of the text, which masks go by
    if not bool((ends == ends[:1]).all()):
        raise UnsupportedModelError("the last token of the prompt has several positions, as tokens of images have")
    return [int(end) - (length - 1) for end, length in zip(ends[0].expand(len(lengths)), lengths, strict=True)]
