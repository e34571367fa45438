"""Image-text models: the class of transformers that reads them, and their text decoder as a causal model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from draftree.core.files import JsonError, read_json
from draftree.models.check import TOLERANCE, tokens_of_check
from draftree.models.native.build import NativeUnavailableError


def image_text_reader(folder: Path) -> Any:
    """Return the class of transformers that reads a folder's model, if it is an image-text model that no causal class
    reads; else None.
    """
    try:
        kind = str(read_json(folder / "config.json").get("model_type"))
    except (FileNotFoundError, JsonError):
        return None  # the reader of damaged settings refuses them
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return None
    return AutoModelForImageTextToText


def text_part(model: Any) -> Any:
    """Return the text decoder of an image-text model as a causal model, which shares its weights; others as they are.

    Raises:
        NativeUnavailableError: the decoder with its head gives other logits for a text than the whole model.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if head is None or decoder in (model, model.base_model) or model.config.get_text_config() is model.config:
        return model
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(decoder.config), None)
    part = _of_class(known, decoder, head) if isinstance(known, type) else _of_family(decoder, head)
    part.generation_config = model.generation_config
    _require_alike(part.eval(), model)
    return part


def _of_class(kind: Any, decoder: Any, head: nn.Module) -> Any:
    with torch.device("meta"):
        part = kind(decoder.config)
    setattr(part, part.base_model_prefix, decoder)
    part.set_output_embeddings(head)
    return part


def _of_family(decoder: Any, head: nn.Module) -> Any:
    """Return a model of a class that transformers does not have, with what it says of the decoder's family."""
    parent = next(each for each in type(decoder).__mro__[1:] if issubclass(each, PreTrainedModel))

    def init(self: Any) -> None:
        parent.__init__(self, decoder.config)
        self.model, self.lm_head = decoder, head

    def forward(
        self: Any, input_ids: Any = None, past_key_values: Any = None, *, logits_to_keep: Any = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        output = self.model(input_ids=input_ids, past_key_values=past_key_values, **inputs)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, rows])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)

    methods = {"__init__": init, "forward": forward, "base_model_prefix": "model"}
    methods["get_output_embeddings"] = lambda self: self.lm_head
    return type(f"{type(decoder).__name__}ForCausalLM", (parent,), methods)()


@torch.inference_mode()
def _require_alike(part: Any, model: Any) -> None:
    if any(parameter.is_meta for parameter in part.parameters()):
        raise NativeUnavailableError(f"its text decoder has other parts than {type(part).__name__}")
    ids = torch.tensor([tokens_of_check(int(part.config.vocab_size))], device=model.device)
    logits, wanted = (each(input_ids=ids, use_cache=False).logits.float() for each in (part, model))
    error = float((wanted - logits).abs().max()) / (float(wanted.amax() - wanted.amin()) or 1.0)
    if not error <= TOLERANCE[model.dtype]:
        raise NativeUnavailableError(
            f"its text decoder gives other logits than the whole model (error {error:.1e} of their spread)"
        )
