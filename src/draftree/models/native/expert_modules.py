"""Experts of a transformers model, and the router that chooses them: found by structure, checked by values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftree.models.native.blueprint import MAX_EXPERTS, ExpertsBlueprint, LinearBlueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.modules import Names, first_part, linear_of, linears_of, part

ROUTER = ("gate", "router")
ROWS = 8
"""Number of random rows with which a router is compared."""
TOLERANCE = 2.0**-6
"""Largest error of a weight: that of two roundings to bfloat16."""


def has_experts(mlp: Any) -> bool:
    """Return whether a module chooses among experts."""
    return first_part(mlp, "experts") is not None


def activation_module(mlp: Any) -> Any:
    """Return the module whose activation the experts use."""
    return part(mlp, "experts") if has_experts(mlp) else mlp


def clamps_of(mlp: Any) -> tuple[float, float] | None:
    """Return limit and slope of gates that are clamped; None if they are not."""
    experts = activation_module(mlp)
    found = first_part(experts, "limit"), first_part(experts, "alpha")
    return None if found[0] is None or found[1] is None else (float(found[0]), float(found[1]))


def experts_of(mlp: Any, hidden: int, *, names: Names) -> ExpertsBlueprint:
    """Return the experts of a layer.

    Args:
        mlp: module with `experts` and a router.
        hidden: size of hidden states.
        names: names of the model's parameters.

    Raises:
        NativeUnavailableError: they are stored or chosen in another way.
    """
    experts, router = part(mlp, "experts"), part(mlp, *ROUTER)
    weight = first_part(experts, "gate_up_proj")
    if not isinstance(weight, Tensor) or weight.dim() != 3 or not isinstance(first_part(experts, "down_proj"), Tensor):
        raise NativeUnavailableError(f"{type(experts).__name__} does not store all experts in one weight")
    is_transposed = bool(getattr(experts, "is_transposed", weight.shape[2] != hidden))
    is_interleaved = not getattr(experts, "is_concatenated", clamps_of(mlp) is None)
    count, inner = int(weight.shape[0]), int(weight.shape[2 if is_transposed else 1]) // 2
    if count > MAX_EXPERTS:
        raise NativeUnavailableError(f"it has {count} experts in a layer, of {MAX_EXPERTS} at most")

    def linear(field: str, inputs: int, outputs: int, *, interleaved: bool = False) -> LinearBlueprint:
        bias = first_part(experts, f"{field}_bias")
        return LinearBlueprint(
            names.of_parameter(getattr(experts, field)),
            None if bias is None else names.of_parameter(bias),
            inputs,
            outputs,
            is_transposed=is_transposed,
            expert=0,
            is_interleaved=interleaved,
        )

    shared = first_part(mlp, "shared_expert")
    gate = first_part(mlp, "shared_expert_gate")
    if (shared is None) != (gate is None):
        raise NativeUnavailableError("its shared expert has no gate, or the gate has no expert")
    chosen, is_renormalized = _choice(router, count, hidden)
    return ExpertsBlueprint(
        router=LinearBlueprint(names.of(router), names.of_bias(router), hidden, count),
        gate_up=linear("gate_up_proj", hidden, 2 * inner, interleaved=is_interleaved),
        down=linear("down_proj", inner, hidden),
        count=count,
        chosen=chosen,
        is_renormalized=is_renormalized,
        shared_gate_up=()
        if shared is None
        else linears_of(shared, ("gate_proj", "up_proj"), ("gate_up_proj",), names=names),
        shared_down=None if shared is None else linear_of(part(shared, "down_proj"), "'down_proj'", names=names),
        shared_gate=None if gate is None else linear_of(gate, "'shared_expert_gate'", names=names),
    )


@torch.inference_mode()
def _choice(router: Any, count: int, hidden: int) -> tuple[int, bool]:
    """Return how many experts a router chooses, and whether its softmax runs over these only, by its values.

    Raises:
        NativeUnavailableError: it does not choose the largest logits of a product with weights of a softmax.
    """
    weight: Tensor = part(router, "weight").detach()
    bias = first_part(router, "bias")
    if tuple(weight.shape) != (count, hidden):
        raise NativeUnavailableError(f"{type(router).__name__} has a weight of the shape {tuple(weight.shape)}")
    x = torch.randn(ROWS, hidden, generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    found = router(x)
    if not isinstance(found, tuple) or len(found) != 3:
        raise NativeUnavailableError(f"{type(router).__name__} does not return logits, weights and experts")
    scores, indices = found[1].float(), found[2]
    logits = torch.nn.functional.linear(x, weight, None if bias is None else bias.detach()).float()
    chosen = int(indices.shape[-1])
    over_all, over_chosen = logits.softmax(-1).gather(-1, indices), logits.gather(-1, indices).softmax(-1)
    for is_renormalized, wanted in ((False, over_all), (True, over_chosen)):
        if scores.shape == wanted.shape and torch.allclose(scores, wanted, rtol=0, atol=TOLERANCE):
            largest = logits.topk(chosen, dim=-1).values.amin(-1, keepdim=True)
            if bool((logits.gather(-1, indices) >= largest).all()):
                return chosen, is_renormalized
    raise NativeUnavailableError(f"{type(router).__name__} chooses or weighs experts in another way")
