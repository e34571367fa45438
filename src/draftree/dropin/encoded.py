"""Calls of `generate` of encoder-decoder models: the source is the output of the encoder, which transformers ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.dropin.drafting import Drafting
from draftree.dropin.refusals import WITHOUT, refuse_cache
from draftree.models.source import HiddenSource
from draftree.models.torch.cache_argument import CACHE_NAMES

_KNOWN = frozenset(
    {
        "attention_mask",
        "cache_position",
        "decoder_attention_mask",
        "encoder_outputs",
        "logits_to_keep",
        "use_cache",
        *CACHE_NAMES,
    }
)


def sources_of(model: Any, input_ids: Tensor, inputs: Mapping[str, Any], *, max_length: int, context: int) -> list[Any]:
    """Return the source of each row.

    Args:
        model: the model.
        input_ids: the decoder's prompts, shape (batch, length).
        inputs: what generate would hand to the model's forward.
        max_length: tokens of a row at most.
        context: positions that the decoder knows.

    Raises:
        InvalidRequestError: names the input that cannot be honoured.
    """
    strange = sorted(name for name, value in inputs.items() if name not in _KNOWN and value is not None)
    if strange:
        raise InvalidRequestError(
            f"{', '.join(strange)} cannot be honoured: of an encoder-decoder model Draftree takes the encoder's output "
            f"with its attention mask; leave the others out, or {WITHOUT}"
        )
    refuse_cache(inputs)
    decoder_mask = inputs.get("decoder_attention_mask")
    if decoder_mask is not None and not bool(decoder_mask.all()):
        raise InvalidRequestError(
            f"decoder_attention_mask hides tokens, and the decoder's prompts may have no padding: {WITHOUT}"
        )
    if max_length > context:
        raise InvalidRequestError(
            f"the decoder's prompt and the output may have {max_length} tokens, but the decoder's context holds "
            f"{context}: set max_new_tokens to {context - input_ids.shape[1]} at most"
        )
    hidden = inputs["encoder_outputs"][0]
    mask = inputs.get("attention_mask") if model.main_input_name == "input_ids" else None
    rows = range(hidden.shape[0])
    if mask is None:
        return [HiddenSource(hidden[row : row + 1]) for row in rows]
    if mask.shape != hidden.shape[:2] or not bool(mask.any(dim=1).all()):
        raise InvalidRequestError(
            f"attention_mask has shape {tuple(mask.shape)}: it must show at least one token of each of the sources, "
            f"whose shape is {tuple(hidden.shape[:2])}"
        )
    return [HiddenSource(hidden[row : row + 1, mask[row] != 0]) for row in rows]


def refuse_models(model: Any, drafting: Drafting, *, assistant: Any) -> None:
    """Raise for a draft model, which would need the input of the encoder.

    Raises:
        ConfigurationError: names the model.
    """
    if assistant is not None or drafting.draft.partition(":")[0] == "model":
        raise ConfigurationError(
            f"{type(model).__name__} is an encoder-decoder, and transformers passes the output of its encoder only, "
            "which no other model can read: name a drafter without a model, such as draft='ngram', or use draftree.LLM"
        )
