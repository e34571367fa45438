"""One recorded pass of a decoder: where its norms, scales and positions are applied."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftree.models.native.build import NativeUnavailableError

TOLERANCE = 2e-2
"""Largest relative difference between a factor and one of the usual ones, in half precision."""


@dataclass(frozen=True, slots=True)
class RecordedDecoder:
    """Facts about a decoder.

    Attributes:
        is_post_norm: whether norms follow their sublayers.
        is_start_norm_first: whether positions are added after the norm of embeddings.
        embedding_scale: factor of embeddings.
        head_scale: factor of what the head reads.
    """

    is_post_norm: bool
    is_start_norm_first: bool
    embedding_scale: float
    head_scale: float


@torch.inference_mode()
def record(model: Any, decoder: Any, *, first: Any, attention: Any, start_norm: Any) -> RecordedDecoder:
    """Run a decoder over two texts of one token each.

    Args:
        model: the model.
        decoder: its decoder.
        first: norm of the first layer's attention.
        attention: that attention.
        start_norm: norm of embeddings; None for none.

    Raises:
        NativeUnavailableError: a factor is none of the usual ones.
    """
    tokens = [token for token in range(3, 8) if token != getattr(model.config, "pad_token_id", None)][:2]
    one, other = (_inputs(model, decoder, first, attention, start_norm, token) for token in tokens)
    weight: Tensor = decoder.embed_tokens.weight
    rows = (weight[tokens[0]] - weight[tokens[1]]).float()
    # positions cancel in the difference of two tokens
    entered = "layer" if start_norm is None else "start norm"
    scale = _factor(one.tensors[entered] - other.tensors[entered], rows, "embeddings")
    is_first = start_norm is not None and not torch.equal(one.tensors["layer"], one.tensors["after start norm"])
    return RecordedDecoder(
        is_post_norm=one.order.index("attention") < one.order.index("norm"),
        is_start_norm_first=is_first,
        embedding_scale=scale,
        head_scale=_factor(one.tensors["head"], one.tensors["decoder"], "hidden states"),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """Vectors by the module that reads or returns them, and the order of two modules."""

    tensors: dict[str, Tensor]
    order: list[str]


def _inputs(model: Any, decoder: Any, first: Any, attention: Any, start_norm: Any, token: int) -> _Recorded:
    found = _Recorded({}, [])

    def reads(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            value = args[0] if args else given.get("hidden_states")
            if isinstance(value, Tensor):
                found.tensors.setdefault(name, value.flatten(0, -2)[-1].float())
            found.order.append(name)

        return hook

    def returns(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            value = output if isinstance(output, Tensor) else output[0]
            found.tensors.setdefault(name, value.flatten(0, -2)[-1].float())

        return hook

    from transformers.modeling_outputs import BaseModelOutput

    layer = next(iter(getattr(decoder, "layers", None) or decoder.block))
    inputs = [(layer, "layer"), (first, "norm"), (attention, "attention"), (model.get_output_embeddings(), "head")]
    outputs = [(decoder, "decoder")]
    if start_norm is not None:
        inputs.append((start_norm, "start norm"))
        outputs.append((start_norm, "after start norm"))
    with ExitStack() as hooks:
        for module, name in inputs:
            hooks.callback(module.register_forward_pre_hook(reads(name), with_kwargs=True).remove)
        for module, name in outputs:
            hooks.callback(module.register_forward_hook(returns(name)).remove)
        size = int(model.config.hidden_size)
        hidden = torch.linspace(-1, 1, size, dtype=next(model.parameters()).dtype).expand(1, 2, size)
        model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            decoder_input_ids=torch.tensor([[token]]),
            use_cache=False,
            return_dict=True,
        )
    return found


def _factor(found: Tensor, of: Tensor, what: str) -> float:
    """Return the factor between two vectors: 1, or the root of their size or its inverse."""
    factor = float((found * of).sum() / of.square().sum().clamp_min(torch.finfo().tiny))
    root = float(found.numel()) ** 0.5
    for usual in (1.0, root, 1.0 / root):
        if abs(factor - usual) <= TOLERANCE * usual:
            return usual
    raise NativeUnavailableError(f"it multiplies {what} by {factor:.4g}")
