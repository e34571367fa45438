"""Products of packed weights of few bits in torch, in place of a model's own modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.native.blueprint import (
    CLAMPED_SILU,
    GELU,
    GELU_TANH,
    QUICK_GELU,
    RELU,
    SILU,
    Blueprint,
    LayerBlueprint,
    LinearBlueprint,
)
from draftree.models.native.library import LANES
from draftree.models.native.model import NativeModel, UnpackedWeights
from draftree.models.native.packing import arranged

__all__ = ["PackedExperts", "PackedProduct", "products_of_rows", "rounded"]

GROUP_INPUTS, LARGEST = 32, 127


def rounded(inputs: Tensor) -> Tensor:
    """Return inputs of products as passes in C round them: 8 bits, one scale for each 32 numbers of the last dimension.

    Args:
        inputs: shape (…, inputs); the last group may be shorter.

    Returns:
        A tensor of the same shape, float32.
    """
    size = inputs.shape[-1]
    groups = F.pad(inputs.float(), (0, -size % GROUP_INPUTS)).unflatten(-1, (-1, GROUP_INPUTS))
    most = groups.abs().amax(-1, keepdim=True)
    steps = groups * torch.where(most > 1e-30, LARGEST / most, 0)
    return (steps.round() * (most / LARGEST)).flatten(-2)[..., :size]


def products_of_rows(layer: LayerBlueprint) -> Iterator[LinearBlueprint]:
    """Yield the products of a layer that every row uses; routers are not among them."""
    yield from (*layer.qkv, layer.output)
    if layer.source is not None:
        yield from (layer.source.query, layer.source.output)
    if layer.experts is None:
        yield from (*layer.gate_up, layer.down)
    elif layer.experts.shared_down is not None:
        yield from (*layer.experts.shared_gate_up, layer.experts.shared_down)


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """A linear layer that is computed with its packed weight, unpacked for each call.

    Attributes:
        module: the linear layer.
        linear: how its weight is stored.
        head_dim: size of a head.
        weights: the packed weights.
    """

    module: nn.Module
    linear: LinearBlueprint
    head_dim: int
    weights: UnpackedWeights

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the product of rounded inputs, float32, in the order of the module's outputs."""
        linear = self.linear
        weight, bias = self.weights.get(linear.weight).float(), None
        # a bias that the module does not have is added by the model
        if linear.bias is not None and getattr(self.module, "bias", None) is not None:
            bias = self.weights.get(linear.bias).float()[: len(weight)]
        self.weights.release(linear.weight)
        found = F.linear(rounded(inputs), weight, bias)
        if not linear.is_reordered:
            return found
        places = torch.arange(linear.outputs, dtype=torch.float32)[:, None]
        order = arranged(places, replace(linear, is_transposed=False), head_dim=self.head_dim)[:, 0].long()
        return torch.empty_like(found).index_copy_(-1, order, found)


ACTIVATIONS: Mapping[int, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        SILU: F.silu,
        GELU: F.gelu,
        GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
        RELU: F.relu,
        QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    }
)


def gated(plan: Blueprint, gate: Tensor, up: Tensor) -> Tensor:
    """Return what enters the last product of a perceptron."""
    if plan.activation != CLAMPED_SILU:
        return ACTIVATIONS[plan.activation](gate) * up
    gate, limit = gate.clamp(max=plan.gate_limit), plan.gate_limit
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gate * plan.gate_slope)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Experts of a layer that are computed with their packed weights, unpacked one after the other.

    Attributes:
        module: the experts.
        layer: number of their layer.
        ours: the model with the packed weights.
    """

    module: nn.Module
    layer: int
    ours: NativeModel

    def forward(self, hidden: Tensor, *given: Any, **named: Any) -> Tensor:
        """Return the weighted sums of the chosen experts of each row.

        Args:
            hidden: inputs, shape (rows, hidden).
            given: experts of each row and their weights, both of shape (rows, experts of a row), in this order; by
                name in some families.
            named: as above.
        """
        chosen, scores = (*given, *(named[name] for name in ("router_indices", "routing_weights") if name in named))
        found = torch.zeros(hidden.shape, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            rows, places = torch.where(chosen == expert)
            results = self._expert(expert, rounded(hidden[rows]))
            found.index_add_(0, rows, results * scores[rows, places, None].float())
        return found

    def _expert(self, expert: int, inputs: Tensor) -> Tensor:
        plan = self.ours.blueprint
        both = self._product(f"gate_up.{expert}", inputs).unflatten(-1, (-1, 2, LANES))
        inner = gated(plan, both[..., 0, :].flatten(-2), both[..., 1, :].flatten(-2))
        return self._product(f"down.{expert}", rounded(inner))

    def _product(self, name: str, inputs: Tensor) -> Tensor:
        weight, bias = self.ours.decoder.product_weight(self.layer, name, torch.float32)
        return F.linear(inputs, weight, None if bias is None else bias[: len(weight)])
