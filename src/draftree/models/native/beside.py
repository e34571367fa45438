"""Blocks of attention and perceptron beside the residual stream, of which several layers use the same weights.

A block reads the residual stream and the embedding of the token. A linear layer follows it, whose results are added to
what a mixer reads. Adapters of low rank that each use has for itself, and its linear layer, are merged into the weights
of the block, so each use has packed weights of its own. Source: arXiv 2411.15242.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from draftree.models.native.blueprint import LayerBlueprint, LinearBlueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.modules import Names, first_part, linear_of, part

BLOCK, LINEAR, READER = "shared_transformer", "linear", "mamba_decoder"
"""Names in a layer: the block, the linear layer after it, and the layer that reads its results."""
ADAPTERS = tuple(f"linear_{name}_adapter_list" for name in "qkv")
"""Names of lists of adapters, one for each use."""


def unfolded(layers: Iterable[nn.Module]) -> tuple[list[nn.Module], dict[int, Any]]:
    """Return layers in which each block beside the residual stream is one of its own, and their linear layers."""
    modules: list[nn.Module] = []
    linears = {}
    for layer in layers:
        if (block := first_part(layer, BLOCK)) is None:
            modules.append(layer)
        else:
            linears[len(modules)] = part(layer, LINEAR)
            modules += [block, part(layer, READER)]
    return modules, linears


def has_adapters(attention: Any) -> bool:
    """Return whether the outputs of products of queries, keys and values are not all of these."""
    return hasattr(attention, ADAPTERS[0])


def beside(plan: LayerBlueprint, attention: Any, mlp: Any, linear: Any, *, use: int, names: Names) -> LayerBlueprint:
    """Return a layer with the weights of a block as one beside the residual stream; `use`: number of the use."""

    def merged(product: LinearBlueprint, owner: Any, name: str) -> LinearBlueprint:
        if (adapters := first_part(owner, name)) is None:
            return product
        first, second = (linear_of(each, f"'{name}'", names=names) for each in adapters[use])
        return replace(product, added=(first.weight, second.weight))

    after = linear_of(linear, f"'{LINEAR}'", names=names)
    if len(plan.qkv) != len(ADAPTERS) or len(plan.gate_up) != 1 or plan.down is None or after.bias is not None:
        raise NativeUnavailableError("its layers beside the residual stream have other products")
    return replace(
        plan,
        qkv=tuple(merged(product, attention, name) for product, name in zip(plan.qkv, ADAPTERS, strict=True)),
        gate_up=(merged(plan.gate_up[0], mlp, "gate_up_proj_adapter_list"),),
        down=replace(plan.down, after=after.weight),
        is_beside=True,
    )
