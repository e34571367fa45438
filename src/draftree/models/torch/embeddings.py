"""Embedding and output head of a transformers model, with scales, cap and bias.

The facts are read from the configuration and compared with a pass of the model; a model that uses its embedding or its
head in another way is refused.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftree.core.errors import UnsupportedModelError
from draftree.models.embeddings import EmbeddingFacts
from draftree.models.kv.partial import LayerRange
from draftree.models.torch.identity import whole_tensor
from draftree.models.torch.layers import TorchLayers
from draftree.models.torch.packing import PackedLinear

PROBE_TOKENS = (3, 5)
TOLERANCE = 1e-3
HALF_TOLERANCE = 2e-2
"""Maximum relative error between the facts and a pass, in float32 and in half precision."""


def input_embedding(model: Any) -> Tensor:
    """Return the embedding of a model's vocabulary, shape (vocab, hidden); a view of the model's weight.

    Raises:
        UnsupportedModelError: the model has no such matrix.
    """
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return _of_vocabulary(model, weight, "input embedding")


def output_head(model: Any) -> Tensor:
    """Return the output head, shape (vocab, hidden); a view, or a new tensor if the weight is packed.

    Raises:
        UnsupportedModelError: the model has no such matrix.
    """
    head = model.get_output_embeddings()
    weight = head.unpacked() if isinstance(head, PackedLinear) else getattr(head, "weight", None)
    return _of_vocabulary(model, weight, "output head")


def _of_vocabulary(model: Any, weight: Any, what: str) -> Tensor:
    vocab = int(model.config.get_text_config().vocab_size)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[0] < vocab or not weight.is_floating_point():
        raise UnsupportedModelError(
            f"{type(model).__name__} has no {what} of {vocab} rows of numbers: choose a drafter that needs none"
        )
    return whole_tensor(weight)[:vocab]


def scale_of_embedding(embedding: Any, config: Any) -> float:
    """Return the factor of embeddings from the embedding module and the configuration."""
    scale = getattr(embedding, "embed_scale", None)
    own = 1.0 if scale is None else float(torch.as_tensor(scale).to(embedding.weight.dtype))
    return own * float(getattr(config, "embedding_multiplier", 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class _Probe:
    """Pass over one token: module outputs by name, the first layer's input, and logits; one axis each."""

    modules: dict[str, Tensor]
    entered: Tensor
    logits: Tensor


@torch.inference_mode()
def embedding_facts(model: Any, layers: TorchLayers) -> EmbeddingFacts:
    """Return how a model uses its embedding and its head. Runs two passes over one token each.

    Raises:
        UnsupportedModelError: other operations than scale, bias and cap are used.
    """
    layers.require_capture()
    one, other = (_probe(model, layers, token) for token in PROBE_TOKENS)
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    scale, cap = _logit_facts(model, one)
    return EmbeddingFacts(
        embedding_scale=_embedding_scale(model, one, other),
        logit_scale=scale,
        soft_cap=cap,
        bias=None if bias is None else whole_tensor(bias).float(),
    )


def _probe(model: Any, layers: TorchLayers, token: int) -> _Probe:
    found: dict[str, Tensor] = {}

    def reads(module: nn.Module, args: tuple[Any, ...]) -> None:
        found["head input"] = args[0].flatten(0, -2)[-1]

    def writes(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        found["head output"] = output.flatten(0, -2)[-1].float()

    def ends(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        found["base output"] = output[0].flatten(0, -2)[-1]

    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(f"{type(model).__name__} names no output head: choose a drafter that needs none")
    with ExitStack() as stack:
        stack.callback(head.register_forward_pre_hook(reads).remove)
        stack.callback(head.register_forward_hook(writes).remove)
        for base in (model.base_model, model.get_decoder()):  # some models run only a submodule of their base model
            stack.callback(base.register_forward_hook(ends).remove)
        caught = stack.enter_context(layers.running(LayerRange(0, layers.num_layers, capture=(0,))))
        ids = torch.tensor([[token]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    return _Probe(found, caught.hidden[0][-1].float(), logits)


def _tolerance(model: Any) -> float:
    return TOLERANCE if next(model.parameters()).dtype in (torch.float32, torch.float64) else HALF_TOLERANCE


def _embedding_scale(model: Any, one: _Probe, other: _Probe) -> float:
    """Return the scale, from the difference of two tokens at one position, in which learned positions cancel."""
    weight, config = input_embedding(model), model.config.get_text_config()
    first, second = (weight[token].float() for token in PROBE_TOKENS)
    rows, entered = first - second, one.entered - other.entered
    root = float(torch.tensor(weight.shape[1] ** 0.5).to(weight.dtype))
    for scale in (scale_of_embedding(model.get_input_embeddings(), config), root):
        if rows.shape == entered.shape and _is_near(scale * rows, entered, _tolerance(model)):
            return scale
    raise UnsupportedModelError(
        f"{type(model).__name__} changes embeddings by more than a factor before its first layer: choose a drafter "
        "that does not read the target's embedding"
    )


def _logit_facts(model: Any, probe: _Probe) -> tuple[float, float | None]:
    config, tolerance = model.config.get_text_config(), _tolerance(model)
    found = probe.modules
    names = {"head input", "head output", "base output"}
    if names <= set(found) and _is_near(found["head input"].float(), found["base output"].float(), tolerance):
        cap = getattr(config, "final_logit_softcapping", None)
        scaling, factor = getattr(config, "logits_scaling", None), getattr(config, "logit_scale", None)
        for scale in (1.0, 1.0 / scaling if scaling else 1.0, factor or 1.0):
            made = EmbeddingFacts(1.0, float(scale), cap).capped(found["head output"])
            if _is_near(made, probe.logits, tolerance):
                return float(scale), cap
    raise UnsupportedModelError(
        f"{type(model).__name__} does more between its last layer and its logits than a norm, a product, a scale and a "
        "cap: choose a drafter that does not use the target's output head"
    )


def _is_near(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return found.shape == wanted.shape and float((found - wanted).norm()) <= tolerance * float(wanted.norm())
